"""bnb-int8-assign: ``load_state_dict(assign=True)`` breaks 8-bit layers."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import eight_bit

FIX_ID = "bnb-int8-assign"
SHOWS = (
    r"Loading a quantized checkpoint into non-quantized Linear8bitLt|is a Parameter"
    r"|'Parameter' object has no attribute 'SCB'"  # before bitsandbytes 0.50
)


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "used"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_its_state_is_assigned(gpu, ran):
    import torch

    here = gpu.devices[0]
    source, model = eight_bit.linear(here, seed=3), eight_bit.linear(here, seed=1)
    saved = copy.deepcopy(source.state_dict())  # bitsandbytes 0.43.0 has text in it
    reference = eight_bit.run(source, here)
    if ran:
        eight_bit.run(model, here)
    model.load_state_dict(saved, assign=True)
    assert type(model.weight).__name__ == "Int8Params", f"the weight is a {type(model.weight).__name__}"
    assert model.weight.data_ptr() == saved["weight"].data_ptr()
    eight_bit.assert_whole(model, here)
    for _ in range(2):
        assert torch.equal(eight_bit.run(model, here), reference)
    assert torch.equal(model.state_dict()["SCB"], saved["SCB"])


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_full_weights_are_quantized_by_the_first_move(gpu):
    import torch
    from bitsandbytes.nn import Linear8bitLt

    here = gpu.devices[0]
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 64, dtype=torch.float16)
    model, expected = (Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2))
    model.load_state_dict(plain.state_dict(), assign=True)
    assert type(model.weight).__name__ == "Int8Params", f"the weight is a {type(model.weight).__name__}"
    expected.half().load_state_dict(plain.state_dict())
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half().to(here)
    with torch.no_grad():
        assert torch.equal(model.to(here)(inputs), expected.to(here)(inputs))
    assert model.weight.dtype == torch.int8


def test_int8_without_scales_is_refused_as_before(gpu):
    here = gpu.devices[0]
    model = eight_bit.linear(here)
    saved = {name: tensor for name, tensor in model.state_dict().items() if name != "weight"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        model.load_state_dict(saved, assign=True)
    eight_bit.assert_whole(model, here)
