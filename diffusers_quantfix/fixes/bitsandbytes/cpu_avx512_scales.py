"""CPUs with AVX-512 dequantize 4-bit weights of some widths with the scales of other blocks.

Symptom: without an error, a 4-bit layer on the CPU computes with wrong weights where its ``in_features`` is a multiple
    of 16 but not of the block size (64 by default): 16, 48, 80, 96, 4304. Such layers are ``pos_embed.proj`` of
    AuraFlow (16) and ``fc2`` of SigLIP so400m (4304). A forward pass, ``dequantize_4bit``, ``dequantize()`` and a
    merged LoRA are affected; the quantized weight itself is right.
Cause: the AVX-512 branch of ``dequantizeBlockwise4bitCpu`` (csrc/cpu_ops.cpp) looks for the scale of a row's first
    block at row * (width // block size), but blocks are counted through the whole weight. The branch for ARM checks
    that the width is a multiple of the block size; this one does not.
Upstream: not reported; csrc/cpu_ops.cpp in bitsandbytes.
    https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1828 avoids the kernel for blocks of 2048 values and
    more, which are affected for the same reason.
Patch: the native functions get such a weight as rows of one block each, which is the same memory; as a single row where
    the last block is shorter.
"""

from __future__ import annotations

import ctypes
from functools import partial
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-cpu-avx512-scales",
    module="bitsandbytes.cextension",
    claims={"bitsandbytes": ">=0.49.0,<=0.50.2"},
    harm="wrong result",
    patterns=(
        r"\A(?=.*\bcpu\b)(?=.*(4.?bit|nf4|fp4)).*(wrong|other|garbage|differ|incorrect).{0,80}(width|in_features)",
    ),
    frames=(r"avx.?512|\bcpu\b", "in_features|width|dequantize"),
    hot=True,
    since="0.1.0",
)

_NAMES = tuple(
    f"cdequantize_blockwise_cpu_{kind}_{dtype}"
    for kind in ("nf4", "fp4")
    for dtype in ("fp32", "bf16", "fp16")
)


def broken(cextension: ModuleType) -> bool:
    """Dequantize two rows of one and a half blocks; does each block get its own scale?"""
    lib = resolve(cextension, "lib")
    # Without a native library it is None, or an object that raises an error when it is called.
    library = getattr(lib, "__dict__", {}).get("_lib")
    return hasattr(library, _NAMES[0]) and not _is_right(getattr(lib, _NAMES[0]), library)


def _is_right(dequantize: Any, library: Any) -> bool:
    size, rows, width = 64, 2, 96
    ones = (ctypes.c_ubyte * (rows * width // 2))(*[0xFF] * (rows * width // 2))
    scales = (ctypes.c_float * 3)(1, 2, 4)
    out = (ctypes.c_float * (rows * width))()
    call = partial(dequantize, ones, scales, out, *map(ctypes.c_longlong, (size, rows, width)))
    # OpenMP would start its threads, which a program that forks later must not have. The limit is this thread's alone;
    # no signal handler sees it either, since no bytecode runs between the three calls.
    limit = getattr(library, "omp_set_num_threads", None)
    if limit is None:
        call()
    else:
        restore = partial(limit, library.omp_get_max_threads())
        try:
            list(map(partial.__call__, (partial(limit, 1), call, restore)))
        finally:  # for a second probe, of the patch, which is Python
            restore()
    return list(out) == [scale for scale in scales for _ in range(size)]


def patch(cextension: ModuleType, draft: Draft) -> None:
    lib = resolve(cextension, "lib")

    def make(original):
        def dequantize_blockwise(packed, scales, out, blocksize, m, n):
            size, rows, width = blocksize.value, m.value, n.value
            if size > 0 and rows > 1 and width % size:
                count = rows * width
                rows, width = (1, count) if count % size else (count // size, size)
                m, n = ctypes.c_longlong(rows), ctypes.c_longlong(width)
            return original(packed, scales, out, blocksize, m, n)

        return dequantize_blockwise

    for name in _NAMES:
        draft.wrap_plain(lib, name, make)
