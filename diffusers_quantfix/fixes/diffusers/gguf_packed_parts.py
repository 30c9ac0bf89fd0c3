"""GGUF leaves biases, norms, convolutions and embeddings packed.

Symptom: RuntimeError "The expanded size of the tensor (3072) must match the existing size (6144) at non-singleton
    dimension", "Input type (c10::BFloat16) and bias type (unsigned char) should be the same" and the like, from the
    first forward pass of a GGUF model whose file has these tensors in BF16, like many ComfyUI files.
Cause: ``load_gguf_checkpoint`` reads every type but F32 and F16 as packed bytes, even BF16, and ``GGUFLinear`` unpacks
    only its weight. Everything else stays packed, twice as long for BF16.
Upstream: https://github.com/huggingface/diffusers/pull/13697 (0.39.0) unpacks modules that stay in float32 or are not
    converted; the rest is open.
Patch: packed tensors that are not the weight of a Linear layer are dequantized in the state dict, before any layer is
    replaced. To the loader they look like those stored in float32.
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
    id="diffusers-gguf-packed-parts",
    module="diffusers.quantizers.gguf.gguf_quantizer",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "gguf": ""},
    patterns=(
        r"[Ii]nput type .{1,40} and bias type \(unsigned char\) should be the same",
        r"expected bias to be 1-dimensional with \d+ elements",
        r"The expanded size of the tensor \(\d+\) must match the existing size \(\d+\) at non-singleton dimension",
    ),
    frames=("gguf/utils.py", "GGUF"),
)


def broken(gguf_quantizer: ModuleType) -> bool:
    """Is a norm's packed weight still packed when the loader starts to put tensors into a model?"""
    import torch

    packed = packed_one(gguf_quantizer, "BF16", (2,))
    tensors = {"norm.weight": packed}
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(1, device="meta")})
    prepare(gguf_quantizer, model, [], tensors)
    return tensors["norm.weight"] is packed


def patch(gguf_quantizer: ModuleType, draft: Draft) -> None:
    import torch

    def make(original: Any) -> Any:
        def _process_model_before_weight_loading(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            layers = dict(model.named_modules())

            def is_unpacked(name: str) -> bool:
                place, _, leaf = name.rpartition(".")
                # A tensor that no layer has is not loaded; upstream reports it.
                return place in layers and not (
                    leaf == "weight" and isinstance(layers[place], torch.nn.Linear)
                )

            unpack(kwargs.get("state_dict") or {}, is_unpacked)
            return original(self, model, *args, **kwargs)

        return _process_model_before_weight_loading

    draft.wrap_plain(resolve(gguf_quantizer, "GGUFQuantizer"), BEFORE, make)
