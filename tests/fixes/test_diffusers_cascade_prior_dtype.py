"""diffusers-cascade-prior-dtype: the pipeline of Stable Cascade's prior with quantized layers."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import cascade
from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "diffusers-cascade-prior-dtype"
SHOWS = r"not implemented for '(Byte|Char)'"

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_prior_from_a_checkpoint(gpu, tmp_path, bits):
    plain, device = cascade.prior(), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        model.to(device)
    expected, out = cascade.run(plain, "cpu"), cascade.run(model, device)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < {4: 0.3, 8: 0.1}[bits], f"the output differs by {error:.0%}"
    assert torch.equal(cascade.run(model, device), out)


def test_a_plain_prior_computes_in_its_own_dtype():
    model = cascade.prior().to(torch.bfloat16)
    seen = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["sample"].dtype), with_kwargs=True
    )
    cascade.run(model, "cpu")
    assert set(seen) == {torch.bfloat16}
