"""``.to()`` and ``.cuda()`` of 8-bit models of diffusers and transformers.

Upstream: diffusers/models/modeling_utils.py, transformers/modeling_utils.py.
"""

from __future__ import annotations

from . import eight_bit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["open_gates"]


def open_gates(model_class: Any, draft: Draft) -> None:
    """Allow moves of 8-bit ``model_class`` instances that move completely; upstream handles everything else."""
    import torch

    def make_to(original: Any) -> Any:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not eight_bit.passes(self, args, kwargs):
                return original(self, *args, **kwargs)
            eight_bit.move(self, *args, **kwargs)
            return self

        return to

    def make_cuda(original: Any) -> Any:
        def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            if len(given) > 1 or kwargs.keys() - {"device"} or not eight_bit.is_8bit(self):
                return original(self, *args, **kwargs)
            device = given[0] if given else None
            known = isinstance(device, (str, torch.device))
            target = torch.device(device) if known else torch.device("cuda", device)
            if not eight_bit.passes(self, (target,), {}):
                return original(self, *args, **kwargs)
            eight_bit.move(self, target)
            return self

        return cuda

    draft.wrap_plain(model_class, "to", make_to)
    draft.wrap_plain(model_class, "cuda", make_cuda)
