"""Group-offloads a small model without an accelerator, for the probes of the fixes of group offloading.

Upstream: diffusers/hooks/group_offloading.py (``apply_group_offloading``).
"""

from __future__ import annotations

from ..engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

__all__ = ["offloads_on_cpu"]


def offloads_on_cpu(group_offloading: ModuleType, model: Any, level: str) -> bool:
    """Group-offload ``model`` from the CPU to the CPU, at "leaf_level" or "block_level" with blocks of one layer.

    Returns:
        False where that is impossible: some releases query the accelerator, and there is none.
    """
    import torch

    cpu = torch.device("cpu")
    options = {"num_blocks_per_group": 1} if level == "block_level" else {}
    try:
        resolve(group_offloading, "apply_group_offloading")(
            model, onload_device=cpu, offload_device=cpu, offload_type=level, **options
        )
    except AttributeError:
        return False
    return True
