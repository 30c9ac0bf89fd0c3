"""The components manager leaves weights with weight normalization on the GPU.

Symptom: after ``ComponentsManager.enable_auto_cpu_offload()`` and a run of a model with torch's ``weight_norm``, as
    MiniMax H3's audio autoencoder has it, a copy of all its normalized weights stays on the GPU, also after
    ``disable_auto_cpu_offload()``.
Cause: the computed weight is no parameter, so ``module.to("cpu")`` of the manager's hook leaves it where it is.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/modular_pipelines/components_manager.py#L84;
    not reported.
Patch: the hook moves the computed weights too.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.weight_norm import OffloadedModel, offload_weights

FIX = Fix(
    __doc__,
    id="diffusers-auto-offload-weight-norm",
    module="diffusers.modular_pipelines.components_manager",
    claims={"diffusers": ">=0.35.0,<=0.42.1"},
    harm="memory or time",
    frames=("ComponentsManager", "enable_auto_cpu_offload", "weight_norm"),
    since="0.1.0",
)

_HOOK = "CustomOffloadHook"


def broken(components_manager: ModuleType) -> bool:
    """Offload a model with such a layer: is its weight left behind?"""
    model = OffloadedModel()
    resolve(components_manager, _HOOK)(execution_device="cpu").init_hook(model)
    return not model.weight.is_taken_along


def patch(components_manager: ModuleType, draft: Draft) -> None:
    def make(original):
        def init_hook(self, module):
            module = original(self, module)
            offload_weights(module)
            return module

        return init_hook

    draft.wrap_plain(resolve(components_manager, _HOOK), "init_hook", make)
