"""GGUF leaves modules packed that should stay in float32 or not be converted.

Symptom: RuntimeError "mat1 and mat2 must have the same dtype, but got Byte and BFloat16" from Wan and related models
    whose file has the layers of ``time_embedder`` packed; the same for a layer in
    ``quantization_config.modules_to_not_convert``. A module in that list silently stays packed.
Cause: ``_replace_with_gguf_linear`` compares the names only with the last part of a layer's name, and a layer that it
    leaves alone gets the packed bytes. Wan casts its time step to the dtype of ``time_embedder``'s first weight: uint8.
Upstream: https://github.com/huggingface/diffusers/pull/13697, released in 0.39.0.
Patch: the weights of these modules are dequantized in the state dict, before any layer is replaced. To the loader they
    look like those stored in float32.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...loading.gguf import BEFORE, packed_one, prepare, unpack

FIX = Fix(
    __doc__,
    id="diffusers-gguf-kept-modules",
    module="diffusers.quantizers.gguf.gguf_quantizer",
    claims={"diffusers": ">=0.32.0,<0.39.0", "gguf": ""},
    since="0.1.0",
    # The message alone also comes from other packed layers.
    patterns=(r"(gguf|GGUF).{0,2000}same dtype.{0,30}Byte", r"same dtype.{0,30}Byte.{0,400}GGUF"),
    frames=("gguf/utils.py:forward_native", "GGUF", "transformer_wan", "modules_to_not_convert"),
    fixed_in="diffusers 0.39.0",
)


def broken(gguf_quantizer: ModuleType) -> bool:
    """Is a layer in a module that stays in float32 replaced by a packed one?"""
    import torch

    model = torch.nn.ModuleDict(
        {"kept": torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False, device="meta"))}
    )
    prepare(gguf_quantizer, model, ["kept"], {"kept.0.weight": packed_one(gguf_quantizer, "Q4_0", (1, 18))})
    return type(model["kept"][0]) is not torch.nn.Linear


def patch(gguf_quantizer: ModuleType, draft: Draft) -> None:
    def make(original: Any) -> Any:
        def _process_model_before_weight_loading(
            self: Any, model: Any, device_map: Any, keep_in_fp32_modules: Any = (), **kwargs: Any
        ) -> Any:
            kept = frozenset((*self.modules_to_not_convert, *keep_in_fp32_modules))
            unpack(kwargs.get("state_dict") or {}, lambda name: not kept.isdisjoint(name.split(".")))
            return original(
                self, model, device_map, keep_in_fp32_modules=list(keep_in_fp32_modules), **kwargs
            )

        return _process_model_before_weight_loading

    draft.wrap_plain(resolve(gguf_quantizer, "GGUFQuantizer"), BEFORE, make)
