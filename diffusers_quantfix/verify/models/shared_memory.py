"""Models whose weights are put into shared memory, for the cases."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def outputs_stay(model: Any, run: Callable[[Any], Any]) -> str:
    """Share the weights of ``model``, which may end the process, and compare the outputs."""
    import torch

    before = run(model)
    model.share_memory()
    assert all(weight.is_shared() for weight in model.parameters()), "a weight is not shared"
    assert torch.equal(run(model), before), "the output differs"
    return "the weights are in shared memory, and the output is the same"
