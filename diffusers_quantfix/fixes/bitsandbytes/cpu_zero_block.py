"""Quantizing a block of zeros on the CPU crashes the process.

Symptom: "Segmentation fault" in ``quantize_blockwise`` on the CPU. Double quantization of a 4-bit weight triggers it if
    all blocks have the same largest value, as in a layer of zeros or ones: it quantizes the largest values minus their
    mean.
Cause: ``quantize_block`` of the native library divides a block by its largest value. Zero divided by zero is NaN, and
    its binary search uses the value, converted to an integer, as a table index without a range check. NaN and infinity
    in the input do the same.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1744; 0.49.0 has a different kernel, which
    writes zeros for such a block.
Patch: the native function, as bitsandbytes calls it: a block of zeros gets the scale and the indices that 0.49.0 gives
    it, and NaN and infinity raise an error. (0.49.0 quantizes NaN to some number within the range of its block.)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-cpu-zero-block",
    module="bitsandbytes.cextension",
    claims={"bitsandbytes": ">=0.43.0,<0.49.0"},
    patterns=(
        r"\A(?=.*(quantize_blockwise|quantize_4bit|Params4bit|bitsandbytes/)).*(Segmentation fault|SIGSEGV)",
    ),
    frames=("quantize_blockwise", "quantize_4bit", "Params4bit"),
    fixed_in="bitsandbytes 0.49.0",
    since="0.1.0",
    hot=True,
    asked_once=True,
)

_FUNCTION = "cquantize_blockwise_cpu_fp32"


def broken(cextension: ModuleType) -> bool:
    """Is there a native library with the old kernel?

    The kernel cannot be tried: it would crash.  The release with the new kernel added CPU functions, which its library
    exports.
    """
    lib = resolve(cextension, "lib")
    # Without a native library it is None, or an object that raises an error when it is called.
    attributes = getattr(lib, "__dict__", {})
    library = attributes.get("_lib", lib)  # the ``ctypes.CDLL``; its wrapper has an attribute for every name
    return hasattr(library, _FUNCTION) and not hasattr(library, "cdequantize_blockwise_cpu_bf16")


def patch(cextension: ModuleType, draft: Draft) -> None:
    import ctypes

    import torch

    def tensor_at(pointer: Any, kind: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer((kind * count).from_address(pointer.value), dtype=dtype)

    def largest_of(values: torch.Tensor, size: int) -> torch.Tensor:
        """The largest magnitude in every block of ``size``, NaN where one is NaN; the last block may be shorter."""
        whole = values.numel() // size * size
        parts = [values[:whole].view(-1, size), values[whole:].view(1, -1)]
        return torch.cat([torch.linalg.vector_norm(part, torch.inf, dim=1) for part in parts if part.numel()])

    def make(original):
        def quantize_blockwise(code, values, absmax, out, blocksize, n):
            size, count = blocksize.value, n.value
            if size <= 0 or count <= 0:
                return original(code, values, absmax, out, blocksize, n)
            given = tensor_at(values, ctypes.c_float, count, torch.float32)
            largest = largest_of(given, size)
            wrong = ~largest.isfinite()
            if wrong.any():
                raise ValueError(
                    f"bitsandbytes cannot quantize NaN or infinity on the CPU: block {int(wrong.int().argmax())} of "
                    f"{len(largest)} has some, with {size} values each"
                )
            zeros = largest == 0
            if not zeros.any():
                return original(code, values, absmax, out, blocksize, n)
            # The kernel gets ones instead of the zeros, and what it wrote for them is replaced.
            where = zeros.repeat_interleave(size)[:count]
            filled = given.masked_fill(where, 1)
            result = original(code, ctypes.c_void_p(filled.data_ptr()), absmax, out, blocksize, n)
            tensor_at(absmax, ctypes.c_float, len(zeros), torch.float32)[zeros] = 0
            tensor_at(out, ctypes.c_ubyte, count, torch.uint8)[where] = 0
            return result

        return quantize_blockwise

    draft.wrap_plain(resolve(cextension, "lib"), _FUNCTION, make)
