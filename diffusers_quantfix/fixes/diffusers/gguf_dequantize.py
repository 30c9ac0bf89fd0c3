"""A dequantized GGUF model has float16 weights, whatever its compute dtype is.

Symptom: after ``model.dequantize()`` of a GGUF model in bfloat16 or float32 the first run raises RuntimeError "self and
    mat2 must have the same dtype, but got BFloat16 and Half".
Cause: ``_dequantize_gguf_and_restore_linear`` uses the weights as returned by ``dequantize_gguf_tensor``: float16, the
    dtype of most types' scales. The quantized layer's forward pass casts them to its ``compute_dtype``.
Upstream: https://github.com/huggingface/diffusers/pull/14333, released in 0.40.0.
Patch: the new layer gets the weight in the old layer's ``compute_dtype``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="diffusers-gguf-dequantize",
    module="diffusers.quantizers.gguf.utils",
    claims={"diffusers": ">=0.32.0,<0.40.0", "gguf": ""},
    since="0.1.0",
    patterns=("must have the same dtype, but got (BFloat16|Float) and Half",),
    frames=("gguf_quantizer.py", "GGUF", "dequantize"),
    fixed_in="diffusers 0.40.0",
)


def broken(utils: ModuleType) -> bool:
    """Dequantize a one-block layer whose compute dtype is float32."""
    import torch

    kind = next(kind for kind in resolve(utils, "GGML_QUANT_SIZES") if kind.name == "Q8_0")
    block, size = resolve(utils, "GGML_QUANT_SIZES")[kind]
    layer = resolve(utils, "GGUFLinear")(block, 1, compute_dtype=torch.float32)
    layer.weight = resolve(utils, "GGUFParameter")(torch.zeros(1, size, dtype=torch.uint8), quant_type=kind)
    model = torch.nn.Sequential(layer)
    resolve(utils, "_dequantize_gguf_and_restore_linear")(model)
    return bool(model[0].weight.dtype != torch.float32)


def patch(utils: ModuleType, draft: Draft) -> None:
    """Replace the code of ``_dequantize_gguf_and_restore_linear``."""
    function, old = (
        own_function(utils, "_dequantize_gguf_and_restore_linear"),
        "dequantize_gguf_tensor(module.weight)",
    )
    draft.replace(function, "__code__", exchanged(function, old, f"{old}.to(module.compute_dtype)"))
