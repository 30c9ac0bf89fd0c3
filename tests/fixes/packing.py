"""4-bit layers on the CPU, and whether bitsandbytes repacks them there."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gate import unmet


def dequantized(layer):
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().clone()


def shaped(rows: int, columns: int, double_quant: bool = False, **options):
    """A ``Linear4bit`` [rows, columns] on the CPU."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(
        columns,
        rows,
        compute_dtype=torch.float32,
        quant_type="nf4",
        compress_statistics=double_quant,
        **options,
    )
    return layer.to("cpu").eval()


def same_state(one, other) -> bool:
    """Whether two quant states are equal to the last attribute."""
    import torch

    if one is None or other is None:
        return one is other
    if vars(one).keys() != vars(other).keys():
        return False
    for name, value in vars(one).items():
        twin = vars(other)[name]
        if isinstance(value, torch.Tensor):
            equal = torch.equal(value, twin)
        else:
            equal = same_state(value, twin) if name == "state2" else value == twin
        if not equal:
            return False
    return True


def packs() -> bool:
    from bitsandbytes import functional

    return bool(getattr(functional, "has_avx512bf16", bool)())


def needs_packing() -> None:
    if sentence := unmet("bitsandbytes>=0.49"):
        pytest.skip(f"bitsandbytes repacks weights for the CPU from 0.49 on; {sentence}")


def needs_the_kernel() -> None:
    needs_packing()
    if not packs():
        pytest.skip("this CPU has no AVX512-BF16, bitsandbytes does not repack on it")


def torch_equal(one, other) -> bool:
    import torch

    return one.dtype == other.dtype and torch.equal(one, other)


def keep_unpacked(monkeypatch) -> None:
    """4-bit layers that are made from now on are not repacked by a forward pass on the CPU.

    On a CPU with AVX512-BF16 the defect of ``bnb-cpu-packing`` would show instead of the one that is asked about.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False, raising=False)
