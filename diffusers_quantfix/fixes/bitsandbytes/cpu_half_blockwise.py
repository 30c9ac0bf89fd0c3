"""Block-wise quantization on the CPU reads 16-bit numbers as 32-bit ones.

Symptom: ``bitsandbytes.functional.quantize_blockwise`` of a float16 or bfloat16 tensor on the CPU, and
    ``dequantize_blockwise`` to one, or with ``nested`` scales, give noise or zeros without an error, or crash the
    process with "Segmentation fault".
Cause: the only CPU kernel is for float32, and gets the address of whatever tensor is passed: it reads and writes twice
    as many bytes as the tensor has, and reads quantized scales as float32.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1540;
    https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1544 raises an error from 0.46.0 on; 0.47.0 supports
    it.
Patch: the kernel gets a float32 copy and the dequantized scales, and its output is cast; other types raise the
    ValueError that they raise on a GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="bnb-cpu-half-blockwise",
    module="bitsandbytes.functional",
    claims={"bitsandbytes": ">=0.43.0,<0.46.0"},
    harm="wrong result",
    patterns=(r"Segmentation fault.{0,2000}bitsandbytes/functional\.py.{0,40}in (de)?quantize_blockwise",),
    frames=("quantize_blockwise", "cpu", "float16|bfloat16|half"),
    fixed_in="bitsandbytes 0.46.0",
    hot=True,
    since="0.1.0",
    asked_once=True,
)

REFUSED = "Blockwise quantization only supports 16/32-bit floats, but got {}"
_NAME = "quantize_blockwise"


def broken(functional: ModuleType) -> bool:
    """Does the function itself call the CPU kernel? Later ones leave that to an operator, which checks the dtype."""
    function = resolve(functional, _NAME)
    return "cquantize_blockwise_cpu_fp32" in names_used(function)


def patch(functional: ModuleType, draft: Draft) -> None:
    torch = sys.modules["torch"]
    half = (torch.float16, torch.bfloat16)

    def make_quantize(original):
        def quantize_blockwise(A, *args, **kwargs):
            if A.device.type != "cpu" or A.dtype == torch.float32:
                return original(A, *args, **kwargs)
            if A.dtype not in half:
                raise ValueError(REFUSED.format(A.dtype))
            quantized, state = original(A.float(), *args, **kwargs)
            state.dtype = A.dtype
            return quantized, state

        return quantize_blockwise

    def make_dequantize(original):
        def dequantize_blockwise(A, quant_state=None, absmax=None, code=None, out=None, *args, **kwargs):
            if A.device.type != "cpu":
                return original(A, quant_state, absmax, code, out, *args, **kwargs)
            wanted = getattr(quant_state if out is None else out, "dtype", None) or torch.float32
            if wanted != torch.float32 and wanted not in half:
                raise ValueError(REFUSED.format(wanted))
            if getattr(quant_state, "nested", False):
                scales = original(quant_state.absmax, quant_state.state2) + quant_state.offset
                args, kwargs = (quant_state.blocksize,), {}
                quant_state, absmax, code = None, scales, quant_state.code
            if wanted == torch.float32:
                return original(A, quant_state, absmax, code, out, *args, **kwargs)
            whole = torch.empty(A.shape, dtype=torch.float32, device=A.device)
            whole = original(A, quant_state, absmax, code, whole, *args, **kwargs)
            return whole.to(wanted) if out is None else out.copy_(whole)

        return dequantize_blockwise

    draft.wrap_plain(functional, _NAME, make_quantize)
    draft.wrap_plain(functional, f"de{_NAME}", make_dequantize)
