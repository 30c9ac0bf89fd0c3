"""A GPU of compute capability 9.0 with quanto's CUDA kernels, on machines that have none.

The rig's devices say that they are CUDA; here they get what quanto asks for before it chooses its own kernels, and
stand-ins, written in PyTorch, for the kernels that Marlin's float8 path calls. On a real GPU, for which quanto compiles
its own, the tests are skipped.
"""

from __future__ import annotations

import functools
import types

import pytest

from tests import rig
from tests.fixes import quanto_models as q


@functools.cache
def _library():
    """The operators of the CUDA extension that a CPU build does not define; for the life of the process."""
    import torch

    q.quanto()
    library = torch.library.Library("quanto", "FRAGMENT")
    defined = dir(torch.ops.quanto)
    schemas = {
        "gemm_f16f8_marlin": "(Tensor a, Tensor b_q_weight, Tensor b_scales, Tensor workspace, int num_bits, "
        "int size_m, int size_n, int size_k) -> Tensor",
        "pack_fp8_marlin": "(Tensor b_q_weight, Tensor perm, int size_k, int size_n, int num_bits) -> Tensor",
        "gemm_f16i4_awq": "(Tensor input, Tensor other, Tensor other_scale, Tensor other_shift, int rows, "
        "int out_cols, int in_cols, int bits, int group_size) -> Tensor",
    }
    functions = {
        "gemm_f16f8_marlin": marlin_gemm,
        "pack_fp8_marlin": marlin_pack,
        "gemm_f16i4_awq": lambda a, w, s, z, *sizes: stand_in().awq_v2_gemm_f16i4(a, w, s, z),
    }
    for name, schema in schemas.items():
        if name not in defined:
            library.define(name + schema)
            library.impl(name, functions[name], "CUDA")
    return library


def stand_in():
    from diffusers_quantfix.weights.quanto_extension import StandIn

    return StandIn("quanto_cuda", "is not there")


def marlin_gemm(a, b_q_weight, b_scales, workspace, num_bits, size_m, size_n, size_k):
    """What the kernel computes and refuses; like upstream's it knows nothing of a bias."""
    import torch

    assert a.dtype in (torch.float16, torch.bfloat16), f"the kernel takes half precision, not {a.dtype}"
    assert a.dtype == b_scales.dtype
    return stand_in().fp8_marlin_gemm(a, b_q_weight, b_scales, workspace, num_bits, size_m, size_n, size_k)


def marlin_pack(b_q_weight, perm, size_k, size_n, num_bits):
    """The inverse of ``MarlinF8PackedTensor.unpack``, found by unpacking the place of each byte."""
    import torch
    from optimum.quanto.tensor.weights.marlin.fp8.packed import MarlinF8PackedTensor

    device = b_q_weight.device
    total, shape = size_k * size_n, (size_k // 16, size_n * 16 // 4)
    places = torch.zeros(size_n, size_k, dtype=torch.int64)
    for byte in range(4):
        packed = ((torch.arange(total) >> (8 * byte)) & 255).to(torch.uint8).view(torch.int32).reshape(shape)
        unpacked = MarlinF8PackedTensor(packed.to(device), (size_n, size_k), (size_k, 1)).unpack()
        places |= unpacked.cpu().contiguous().view(torch.uint8).to(torch.int64) << (8 * byte)
    # The input is in the layout of GPTQ: the bytes of an int32 are four neighbours along k.
    natural = b_q_weight.cpu().contiguous().view(torch.uint8).reshape(size_k // 4, size_n, 4).permute(1, 0, 2)
    result = torch.empty(total, dtype=torch.uint8)
    result[places.flatten()] = natural.reshape(-1)
    return result.view(torch.int32).reshape(shape).to(device)


def _only_on_the_rig() -> None:
    import torch

    if torch.cuda.is_available() and not rig.are_on():
        pytest.skip("these are stand-ins for kernels that quanto compiles for a real device")


def capable(monkeypatch) -> None:
    """Let quanto believe in compute capability 9.0 and in its CUDA extension."""
    import torch
    from optimum.quanto.tensor.weights import qbits, qbytes

    _only_on_the_rig()
    _library()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (qbits, qbytes):
        monkeypatch.setattr(module, "is_extension_available", lambda name: True, raising=False)


def registered(monkeypatch, lib=None):
    """The CUDA extension as a module that quanto has imported; ``lib`` is what it would have compiled."""
    import sys

    module = types.SimpleNamespace(ext=types.SimpleNamespace(lib=lib))
    monkeypatch.setitem(sys.modules, "optimum.quanto.library.extensions.cuda", module)
    return module


def float8_weight(device, out_features: int = 128, in_features: int = 64):
    """A plain float8 weight in float16 on ``device``, and its bias."""
    import torch
    from optimum.quanto.tensor.qtype import qfloat8_e4m3fn
    from optimum.quanto.tensor.weights.qbytes import WeightQBytesTensor

    generator = torch.Generator().manual_seed(0)
    data = torch.randn(out_features, in_features, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(out_features, 1, generator=generator).to(torch.float16)
    bias = 5 + torch.randn(out_features, generator=generator).to(torch.float16)
    parts = (data.to(device), scale.to(device))
    return WeightQBytesTensor(qfloat8_e4m3fn, 0, data.size(), data.stride(), *parts, None), bias.to(device)


def marlin_weight(device, **sizes):
    """The same weight, packed for Marlin, its plain twin, and the bias."""
    from optimum.quanto.tensor.weights.marlin import MarlinF8QBytesTensor

    _only_on_the_rig()
    _library()
    plain, bias = float8_weight(device, **sizes)
    packed = MarlinF8QBytesTensor(
        plain.qtype, 0, plain.size(), plain.stride(), plain._data, plain._scale
    )  # fmt: skip
    return packed, plain, bias
