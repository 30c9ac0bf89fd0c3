"""The audio tokenizer of ACE-Step has 4-bit layers."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.pipelines.ace_step.modeling_ace_step import _AceStepResidualFSQ

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    quantizer = _AceStepResidualFSQ(64).to(where).eval()
    indices = torch.arange(0, 64000, 4000, device=where)[None]
    with torch.no_grad():
        expected = quantizer.get_output_from_indices(indices)
        quantizer.project_out = four_bit.linear(quantizer.project_out, where)
        error = ((quantizer.get_output_from_indices(indices) - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
