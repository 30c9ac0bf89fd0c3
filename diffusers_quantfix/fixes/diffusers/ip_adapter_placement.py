"""An IP-Adapter stays where it was loaded.

Symptom: RuntimeError "Expected all tensors to be on the same device" in the next run, after an IP-Adapter was loaded
    into a group-offloaded UNet, or with ``low_cpu_mem_usage=False`` into the transformer of Flux or Stable Diffusion 3;
    "Tensor on device meta is not on the expected device" under sequential offload. Otherwise it stays on the device,
    if the transformer is offloaded.
Cause: ``_load_ip_adapter_weights`` of a UNet ends with ``self.to(device, dtype)``, which does nothing under group
    offload; that of a transformer moves nothing. (In 0.32 it does: from meta under sequential offload, and a quantized
    Flux refuses the cast.) The hooks and groups were set up before, without the new layers.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/unet.py#L696; not reported.
Patch: the new layers get the device and the dtype of the model, and the groups are set up once more (from 0.35.0 on;
    before, the new layers stay on the onload device).
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ...adapters.new_layers import bring_new_layers, moves_new_layers_only
from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import names_used, resolve
from ...finishing import finished_after
from ...offloading.hooks import group_again, group_config
from ...offloading.suspended import hooks_aside

FIX = Fix(
    __doc__,
    id="diffusers-ip-adapter-placement",
    targets=(
        Target(
            "diffusers-ip-adapter-unet",
            "diffusers.loaders.unet",
            {"diffusers": ">=0.33.0,<=0.42.1"},
        ),
        Target(
            "diffusers-ip-adapter-flux",
            "diffusers.loaders.transformer_flux",
            {"diffusers": ">=0.32.0,<=0.42.1"},
        ),
        Target(
            "diffusers-ip-adapter-sd3",
            "diffusers.loaders.transformer_sd3",
            {"diffusers": ">=0.32.0,<=0.42.1"},
        ),
    ),
    patterns=(
        r"(load_ip_adapter|to_[kv]_ip\(|encoder_hid_proj\(|image_proj\(|image_projection_layer\().{0,2000}"
        r"Expected all tensors to be on the same device",
    ),
    frames=("load_ip_adapter", "loaders/ip_adapter.py", "attention_processor.py", "to_k_ip|to_v_ip"),
    asked_once=True,
)

_MIXINS = {
    "unet": "UNet2DConditionLoadersMixin",
    "transformer_flux": "FluxTransformer2DLoadersMixin",
    "transformer_sd3": "SD3Transformer2DLoadersMixin",
}
_LOAD = "_load_ip_adapter_weights"


def broken(loaders: ModuleType) -> bool:
    """Does it leave the groups as they were? Before 0.33, which has none, that of a UNet is right."""
    if loaders.__name__.endswith("unet") and find_spec("diffusers.hooks") is None:
        return False
    return "_maybe_remove_and_reapply_group_offloading" not in names_used(resolve(_mixin(loaders), _LOAD))


def patch(loaders: ModuleType, draft: Draft) -> None:
    def make(original):
        def load(self, *args, **kwargs):
            known, config = list(self.modules()), group_config(self)

            def work():
                with hooks_aside(self), moves_new_layers_only(self):
                    result = original(self, *args, **kwargs)
                    bring_new_layers(self, known, self.device, self.dtype)
                    return result

            return finished_after(work, lambda: [partial(group_again, self, config)])

        return load

    draft.wrap_plain(_mixin(loaders), _LOAD, make)


def _mixin(loaders: ModuleType) -> Any:
    return resolve(loaders, _MIXINS[loaders.__name__.rpartition(".")[2]])
