"""An IP-Adapter cannot be loaded into a quantized UNet.

Symptom: ValueError "Casting a quantized model to a new `dtype` is unsupported" from ``load_ip_adapter``, with the
    attention processors replaced and the adapter partially loaded.
Cause: ``_load_ip_adapter_weights`` (and ``load_attn_procs`` for Custom Diffusion) ends with ``self.to(dtype=self.dtype,
    device=self.device)``, which is meant to move the new layers, but is refused as a cast.
Upstream: https://github.com/huggingface/diffusers/issues/11570, closed; the line has not changed.
Patch: while an adapter is loaded into a quantized UNet, ``.to`` with the UNet's own dtype moves only the new layers.
    The hooks of a sequentially offloaded UNet, quantized or not, are removed during loading, and the same hooks are
    restored.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.new_layers import moves_new_layers_only
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...offloading.suspended import hooks_aside

FIX = Fix(
    __doc__,
    id="diffusers-ip-adapter-quantized",
    module="diffusers.loaders.unet",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    patterns=(
        "Casting a quantized model to a new (dtype )?is unsupported",
        "cannot cast a bitsandbytes model in a new( dtype|[.])",
    ),
    frames=("load_ip_adapter", "loaders/unet.py", "loaders/ip_adapter.py"),
    asked_once=True,
)

_METHODS = ("_load_ip_adapter_weights", "load_attn_procs")


def broken(unet: ModuleType) -> bool:
    """Does it pass a dtype and a device to ``.to``?"""
    method = resolve(unet, "UNet2DConditionLoadersMixin._load_ip_adapter_weights")
    return ("dtype", "device") in function_of(method).__code__.co_consts


def patch(unet: ModuleType, draft: Draft) -> None:
    def make(original):
        def load(self, *args, **kwargs):
            with hooks_aside(self), moves_new_layers_only(self):
                return original(self, *args, **kwargs)

        return load

    mixin = resolve(unet, "UNet2DConditionLoadersMixin")
    for name in _METHODS:
        draft.wrap_plain(mixin, name, make)
