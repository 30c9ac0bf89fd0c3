"""Weight normalization gives noise under sequential offload, and stays on the GPU under model offload.

Symptom: under ``enable_sequential_cpu_offload()`` audio autoencoders with torch's ``weight_norm`` (LongCat-Audio,
    Oobleck of Stable Audio and ACE-Step) give noise, infinities or NaN, or an error about the meta device. Under
    ``enable_model_cpu_offload()`` a copy of all their normalized weights stays on the GPU after each run.
Cause: ``weight_norm`` computes the weight in a hook before ``forward``, and accelerate onloads the parameters only
    inside ``forward``: the weight is computed on meta and has no data. Nor is the computed weight a parameter, so
    ``module.to("cpu")`` leaves it where it is.
Upstream: not reported; diffusers excludes some of these models from group offload for the same reason.
Patch: the weight is computed after accelerate's hook has onloaded the parameters. Model offload moves the computed
    weights too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.weight_norm import (
    OffloadedModel,
    compute_weight,
    drop_weight,
    normalized_stand_in,
    norms,
    offload_weights,
    take_norms,
)

FIX = Fix(
    __doc__,
    id="accelerate-weight-norm-offload",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0"},
    harm="wrong result",
    since="0.1.0",
)


def broken(hooks: ModuleType) -> bool:
    """Offload one; is its weight still computed before the hook that onloads its parameters, or left behind?"""
    import torch

    model = OffloadedModel()
    resolve(hooks, "CpuOffload")(execution_device="cpu").init_hook(model)
    if not model.weight.is_taken_along:
        return True
    layer = normalized_stand_in(torch.nn.Module(), "meta")
    attach = resolve(hooks, "attach_align_device_hook")
    attach(layer, "cpu", offload=True, weights_map=layer.state_dict())
    return bool(norms(layer))


def patch(hooks: ModuleType, draft: Draft) -> None:
    model_hook: Any = resolve(hooks, "ModelHook")
    add_hook = resolve(hooks, "add_hook_to_module")

    class NormalizeWeight(model_hook):
        """Computes the weight once the parameters are onloaded."""

        def init_hook(self, module):
            self.norms = take_norms(module)
            return module

        def pre_forward(self, module, *args, **kwargs):
            compute_weight(module, self.norms)
            return args, kwargs

        def post_forward(self, module, output):
            drop_weight(module, self.norms)
            return output

        def detach_hook(self, module):
            module._forward_pre_hooks.update(self.norms)
            return module

    def make(original):
        def attach_align_device_hook(module, *args, **kwargs):
            original(module, *args, **kwargs)
            if norms(module) and hasattr(module, "_hf_hook") and next(module.parameters()).is_meta:
                add_hook(module, NormalizeWeight(), append=True)

        return attach_align_device_hook

    def make_init_hook(original):
        def init_hook(self, module):
            module = original(self, module)
            offload_weights(module)
            return module

        return init_hook

    draft.wrap_plain(hooks, "attach_align_device_hook", make)
    draft.wrap_plain(resolve(hooks, "CpuOffload"), "init_hook", make_init_hook)
