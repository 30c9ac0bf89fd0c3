"""Models under FullyShardedDataParallel, for the cases and tests."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def take_apart(model: Any) -> None:
    """Free the memory of a model: its flat parameter and the views of it own each other in C++, where no garbage
    collection sees it.
    """
    import torch

    if model._handle is not None:
        vars(model._handle.flat_param).clear()
    for module in model.modules():
        module._parameters.clear()
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
