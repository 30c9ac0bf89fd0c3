"""peft-unmerge-road, -hira, -pvera, -vera, -oft: out of weights of bitsandbytes these adapters leave the bits."""

from __future__ import annotations

import pytest

from tests.fixes.merged import assert_same, bits, kept, layers_of
from tests.fixes.packing import keep_unpacked
from tests.fixes.test_peft_merge_other_adapters import bnb_layers
from tests.fixes.test_peft_unmerge_other_adapters import assert_taken_out_exactly, enlarge, interrupted, run
from tests.gate import unmet

peft = pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "not what it was"
NEEDS = "bitsandbytes>=0.46"
OPTIONS = {
    "Road": {"group_size": 16},
    "Hira": {"r": 8},
    "Pvera": {"r": 8},
    "Vera": {"r": 8},
    "OFT": {"r": 0, "oft_block_size": 8},
}
WEIGHTS = ["nf4", "int8"]
BOTH = [
    ("Road", "nf4"),
    ("Road", "int8"),
    ("Hira", "nf4"),
    ("Hira", "int8"),
    ("Pvera", "int8"),
    ("Vera", "int8"),
    ("OFT", "nf4"),
    ("OFT", "int8"),
]
each = pytest.mark.parametrize(("kind", "weights"), BOTH)


@pytest.fixture(autouse=True)
def unpacked(monkeypatch, side):
    if side == "bare":
        keep_unpacked(monkeypatch)


def adapted(kind: str, weights: str, names=("one",), device="cpu"):
    import torch

    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    config = getattr(peft, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this peft has no {kind}")
    if kind == "Pvera" and unmet("peft>=0.20"):
        pytest.skip("before 0.20 it cannot run on weights of bitsandbytes: it multiplies the wrong way round")
    if kind == "Vera" and not unmet("peft>=0.20"):
        pytest.skip("from 0.20 on it is one of test_peft_unmerge_other_adapters.py")
    if kind == "OFT" and not unmet("peft>=0.20"):
        pytest.skip("0.20 adds none; then it is one of test_peft_unmerge_other_adapters.py")
    if kind == "OFT" and unmet("peft>=0.16"):
        pytest.skip("before 0.16 there is none for weights of bitsandbytes")
    if kind == "Vera" and unmet("peft>=0.16"):
        pytest.skip("before 0.16 it needs a CUDA device for 8-bit weights, or is not for them")
    torch.manual_seed(1)
    model = bnb_layers(weights).to(device)
    for layer in model:
        layer.bias.data.normal_()
    found = peft.get_peft_model(
        model, config(target_modules=["0", "1"], **OPTIONS[kind]), adapter_name=names[0]
    )
    for name in names[1:]:
        found.add_adapter(name, config(target_modules=["0", "1"], **OPTIONS[kind]))
    enlarge(found)
    return found.eval().to(device)


@pytest.mark.defect("peft-unmerge-road", shows=SHOWS, needs=NEEDS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_road(weights):
    """Its bias too."""
    assert_taken_out_exactly(adapted("Road", weights))


@pytest.mark.defect("peft-unmerge-hira", shows=SHOWS, needs=NEEDS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_hira(weights):
    assert_taken_out_exactly(adapted("Hira", weights))


@pytest.mark.defect("peft-unmerge-pvera", shows=SHOWS, needs="bitsandbytes>=0.47")
def test_pvera():
    assert_taken_out_exactly(adapted("Pvera", "int8"))


@pytest.mark.defect("peft-unmerge-vera", shows=SHOWS, needs=[NEEDS, "peft>=0.16"])
def test_vera():
    assert_taken_out_exactly(adapted("Vera", "int8"))


@pytest.mark.defect("peft-unmerge-oft", shows=SHOWS, needs=NEEDS)
def test_oft():
    """Without ``peft-merge-oft-bnb`` merging into 4-bit weights crashes the process on a CPU."""
    assert_taken_out_exactly(adapted("OFT", "int8"))


def test_oft_in_4_bits():
    assert_taken_out_exactly(adapted("OFT", "nf4"))


@each
def test_several_adapters(kind, weights):
    """Merged one after the other; ``unmerge`` takes the last one out first."""
    import torch

    if kind in ("Pvera", "Vera"):
        pytest.skip("peft puts a second one around the first one's layer, as a layer of its own")
    model = adapted(kind, weights, ("one", "two"))
    before, expected = bits(model), run(model)
    for name in ("one", "two"):
        model.merge_adapter([name])
    assert all(layer.merged_adapters == ["one", "two"] for layer in layers_of(model))
    model.unmerge_adapter()
    assert_same(bits(model), before)
    assert torch.equal(run(model), expected)


@each
def test_on_a_device(gpu, kind, weights):
    assert_taken_out_exactly(adapted(kind, weights, device=gpu.devices[0]), gpu.devices[0])


@each
def test_what_fails_changes_nothing(monkeypatch, kind, weights):
    import torch

    model = adapted(kind, weights)
    expected, before = run(model), bits(model)

    interrupted(monkeypatch, weights, model.merge_adapter)
    assert not any(layer.merged for layer in layers_of(model)) and not kept(model)
    assert_same(bits(model), before)
    model.merge_adapter()
    interrupted(monkeypatch, weights, model.unmerge_adapter)
    assert all(layer.merged for layer in layers_of(model))
    model.unmerge_adapter()
    assert_same(bits(model), before)
    assert torch.equal(run(model), expected)
