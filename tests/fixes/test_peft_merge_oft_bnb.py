"""peft-merge-oft-bnb: an OFT that is merged into weights of bitsandbytes has its effect, and can be taken out."""

from __future__ import annotations

import pytest

from tests.fixes.packing import keep_unpacked
from tests.fixes.test_peft_merge_other_adapters import bnb_layers, run
from tests.gate import unmet

FIX_ID = "peft-merge-oft-bnb"
pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "merged, the output is|unmerged, the output is|mat1 and mat2 shapes|int_mm_out_cpu"
NEEDS = "bitsandbytes>=0.48"  # before it, `bnb-int8-requantize` shows instead
WEIGHTS = ("int8", "nf4")


@pytest.fixture(autouse=True)
def unpacked(monkeypatch, side):
    if side == "bare":
        keep_unpacked(monkeypatch)


def adapted(model, names=("default",)):
    """``model`` with an OFT of each of the names."""
    import peft
    import torch

    if unmet("peft>=0.16"):
        pytest.skip("before 0.16 peft has no OFT for bitsandbytes")
    if not unmet("peft>=0.20,<0.21"):
        pytest.skip("peft 0.20 raises an error where an OFT is added to layers of bitsandbytes")
    config = peft.OFTConfig(
        target_modules=["0", "1"],
        r=0,
        oft_block_size=16,
        init_weights=False,
        use_cayley_neumann=False,  # which is only nearly a rotation, so that taking it out would leave something
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "oft_R" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.eval()


def assert_near(found, expected, what: str) -> None:
    off = (found - expected).abs().max() / expected.abs().max()
    assert off < 0.3, f"{what}, the output is {off:.0%} off"


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_merged_and_taken_out(weights):
    model = adapted(bnb_layers(weights))
    expected = run(model)
    with model.disable_adapter():
        without = run(model)
    off = (without - expected).abs().max() / expected.abs().max()
    assert off > 0.5, "the effect of the OFT is too small to be missed"
    model.merge_adapter()
    assert_near(run(model), expected, "merged")
    model.unmerge_adapter()
    assert_near(run(model), expected, "unmerged")
    with model.disable_adapter():
        assert_near(run(model), without, "unmerged")


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_taken_out_of_4bit_weights():
    """``unmerge`` by itself: what it does to a layer whose weight has the rotation in it."""
    import torch

    model = adapted(bnb_layers("nf4"))
    with model.disable_adapter():
        without = run(model)
    for layer in model.modules():
        if hasattr(layer, "merged_adapters"):
            bnb = pytest.importorskip("bitsandbytes")
            base = layer.get_base_layer()
            weight = bnb.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
            rotated = (layer.oft_R["default"].get_weight().detach() @ weight.t()).t().contiguous()
            base.weight = bnb.nn.Params4bit(rotated, requires_grad=False, quant_type="nf4", module=base).to(
                "cpu"
            )
            layer.merged_adapters.append("default")
    model.unmerge_adapter()
    with model.disable_adapter(), torch.no_grad():
        assert_near(run(model), without, "unmerged")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_layers_that_are_not_square(weights):
    model = adapted(bnb_layers(weights, 64, 32))
    expected = run(model)
    assert_near(run(model.merge_and_unload()), expected, "merged")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_one_of_two(weights):
    model = adapted(bnb_layers(weights), ("first", "second"))
    model.base_model.set_adapter("second")
    expected = run(model)
    model.merge_adapter(["second"], safe_merge=True)
    assert_near(run(model), expected, "merged")
