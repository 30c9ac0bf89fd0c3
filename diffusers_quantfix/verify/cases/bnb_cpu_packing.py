"""A 4-bit layer runs once on the CPU: its weight must not change, and layers of any shape must run."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes import functional
    from bitsandbytes.functional import dequantize_4bit

    from ..case import CannotReproduce
    from ..models import four_bit

    four_bit.device()
    if not getattr(functional, "has_avx512bf16", bool)():
        raise CannotReproduce("needs a CPU with AVX512-BF16, on which bitsandbytes repacks the weights")
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    layer = four_bit.linear(torch.nn.Linear(128, 64), cpu)
    odd = four_bit.linear(torch.nn.Linear(96, 48), cpu)
    before = layer.state_dict()["weight.absmax"].clone()
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    with torch.no_grad():
        layer(torch.ones(1, 128))
        again = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        error = (again.float() - weight.float()).abs().max().item()
        assert error == 0, f"after a forward pass the dequantized weight differs by up to {error:.2f}"
        assert torch.equal(layer.state_dict()["weight.absmax"], before), "the state dict has another absmax"
        odd(torch.ones(1, 96))
    return "after a forward pass the dequantized weight and the state dict are unchanged; a [48, 96] layer runs too"
