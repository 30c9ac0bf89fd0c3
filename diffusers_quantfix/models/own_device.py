"""Pipelines that create their tensors on ``self.device``, where their weights are between two calls.

Under model offload that is the CPU, while the models run on ``self._execution_device``. Their ``device`` becomes that.

Upstream: diffusers/pipelines/pipeline_utils.py (``DiffusionPipeline.device``, ``_execution_device``).
"""

from __future__ import annotations

from ..engine.probe import names_used, resolve
from ..offloading.hooks import accelerate_hooks
from .plain_weights import InPlaceOf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["asks_for_its_own", "becomes_execution_device"]


def asks_for_its_own(cls: Any, method: str) -> bool:
    """Whether ``method`` of the pipeline ``cls`` reads its ``device``, and that is diffusers' own."""
    names = names_used(resolve(cls, method))
    return "_execution_device" not in names and "device" in names and "device" not in vars(cls)


def becomes_execution_device(draft: Draft, cls: Any) -> None:
    """Patch ``device`` of the pipeline ``cls``: the execution device where a component has a hook of accelerate."""
    resolve(cls, "_execution_device")

    def make(upstream: Any) -> Any:
        def device(self: Any) -> Any:
            placed = super(cls, self).device
            if not any(True for part in vars(self).values() for _ in accelerate_hooks(part)):
                return placed
            # Where no hook names a device, the execution device is the pipeline's: it must not ask here again.
            return cls._execution_device.fget(InPlaceOf(self, {"device": placed}))

        return property(device, doc=upstream.__doc__)

    draft.wrap_plain(cls, "device", make)
