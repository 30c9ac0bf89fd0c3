"""``device_map="balanced"`` loses components that fit on no GPU.

Symptom: RuntimeError "Expected all tensors to be on the same device" with ``device_map="balanced"``, when components
    are missing from ``pipe.hf_device_map``. Of several that fit on no GPU, only the last is in it. The others are
    loaded onto the CPU without offloading hooks, or, if quantized, completely onto the current GPU: the first run
    raises that error, or runs out of memory.
Cause: ``_assign_components_to_devices`` creates a new list for the CPU for each such component.
Upstream: not reported; half of https://github.com/huggingface/diffusers/issues/10653 may be this.
Patch: components missing from every list are added to the CPU's list.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-balanced-lost-component",
    module="diffusers.pipelines.pipeline_loading_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    patterns=("Expected all tensors to be on the same device",),
    frames=("balanced", "hf_device_map"),
)


def broken(pipeline_loading_utils: ModuleType) -> bool:
    """Assign two components that are too large."""
    assign = resolve(pipeline_loading_utils, "_assign_components_to_devices")
    return sorted(assign({"one": 2, "two": 2}, {0: 1}).get("cpu", ())) != ["one", "two"]


def patch(pipeline_loading_utils: ModuleType, draft: Draft) -> None:
    def with_the_lost(original, _, args, kwargs):
        assigned = original(*args, **kwargs)
        module_sizes = args[0] if args else kwargs["module_sizes"]
        placed = {component for components in assigned.values() for component in components}
        lost = [component for component in module_sizes if component not in placed]
        if lost:
            assigned["cpu"] = lost + assigned.get("cpu", [])
        return assigned

    draft.wrap_wrapt(pipeline_loading_utils, "_assign_components_to_devices", with_the_lost)
