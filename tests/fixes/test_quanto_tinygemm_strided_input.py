"""quanto-tinygemm-strided-input: int4 weights in bfloat16 whose input is not contiguous."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q
from tests.gate import unmet

FIX_ID = "quanto-tinygemm-strided-input"
SHOWS = "expect A to be contiguous"
torch = pytest.importorskip("torch")


@pytest.fixture
def model():
    q.quanto()
    if unmet("optimum-quanto>=0.2.7") or unmet("torch>=2.6"):
        pytest.skip("this quanto packs for TinyGemm on a GPU only")
    model = q.layers("qint4", torch.bfloat16).requires_grad_(False)
    assert type(model[0].weight).__name__ == "TinyGemmWeightQBitsTensor"
    return model


def strided(how: str):
    """An input of 6 rows of 256 that is not contiguous."""
    whole = q.inputs(torch.bfloat16, rows=12)
    if how == "transposed":
        return whole[:6].t().contiguous().t()
    if how == "part of each row":
        return whole.view(6, 512).chunk(2, -1)[0]
    if how == "every second number":
        return whole.view(6, 512)[:, ::2]
    if how == "transposed sequences":
        return whole[:6].view(2, 3, 256).transpose(1, 2).contiguous().transpose(1, 2)
    return whole[:1].view(1, 1, 256).expand(2, 3, 256)


@pytest.mark.parametrize("how", ["transposed", "part of each row", "every second number"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_output_and_the_gradient_are_those_of_a_contiguous_input(model, how):
    given = strided(how)
    assert not given.is_contiguous()
    found = []
    for whole in (False, True):
        own = (given.contiguous() if whole else given).detach().requires_grad_(True)
        assert own.is_contiguous() == whole
        output = model(own)
        output.float().pow(2).sum().backward()
        found.append((output.detach(), own.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["transposed sequences", "expanded"])
def test_what_is_copied_anyway(model, how):
    given = strided(how)
    with torch.no_grad():
        assert torch.equal(model(given), model(given.contiguous()))


def test_under_autocast(model):
    given = strided("part of each row").float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(given), model(given.contiguous()))


def test_what_is_saved_is_the_input(model):
    """No copy of it is kept for the backward pass."""
    for given in (q.inputs(torch.bfloat16), strided("part of each row")):
        q.assert_saves_no_copy(model[0], given)
