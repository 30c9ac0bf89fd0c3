"""peft-merge-other-adapters: merging an adapter that is no LoRA into quantized weights has no effect."""

from __future__ import annotations

import re

import pytest

from tests.fixes import quanto_models as q
from tests.fixes.packing import keep_unpacked
from tests.gate import unmet

FIX_ID = "peft-merge-other-adapters"
pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "is that without the adapter|merged, the output is|is invalid for input of size|must be 1 to view"
NEEDS = "bitsandbytes>=0.48"  # before it, `bnb-int8-requantize` and a refused quant_storage show instead
REFUSED = r"an adapter in a \w+ of peft\.tuners\.\w+\.\w+ cannot be merged into a \w+: "
KINDS = {
    "HRA": {"r": 8, "init_weights": False},
    "BOFT": {"boft_block_size": 8, "init_weights": False},
    "OFT": {"r": 0, "oft_block_size": 16, "init_weights": False},
    "Vera": {"r": 8, "d_initial": 2.0, "save_projection": True},
    "FourierFT": {"n_frequency": 100, "scaling": 150.0},
    "Bone": {"r": 8, "init_weights": False},
    "Miss": {"r": 8, "init_weights": False},
    "Shira": {"r": 4, "init_weights": False},
    "RandLora": {"r": 8, "init_weights": False, "randlora_alpha": 1},
    "C3A": {"block_size": 16, "init_weights": False},
    "IA3": {"feedforward_modules": ["1"], "init_ia3_weights": False},
    "Beft": {},
}


@pytest.fixture(autouse=True)
def unpacked(monkeypatch, side):
    if side == "bare":
        keep_unpacked(monkeypatch)


def adapted(model, kind: str, targets=("0", "1")):
    """``model`` with an adapter that matters."""
    import peft
    import torch

    config = getattr(peft, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this peft has no {kind}")
    if kind == "Shira" and unmet("peft>=0.20"):
        pytest.skip("before 0.20 it cannot run on weights of quanto: it makes a deep copy of them")
    if kind == "OFT" and unmet("peft>=0.15"):
        pytest.skip("before 0.15 it has other options")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config(target_modules=list(targets), **KINDS[kind])).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return adapted


def bnb_layers(weights: str, features: int = 64, between: int = 64):
    """Two layers, with ``between`` features between them, quantized on the CPU."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"bitsandbytes quantizes on a CPU from 0.46 on; {sentence}")
    shapes = ((features, between), (between, features))
    if weights == "int8":
        layers = [bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False) for shape in shapes]
    else:
        layers = [
            bnb.nn.Linear4bit(*shape, compute_dtype=torch.float32, quant_type="nf4") for shape in shapes
        ]
    model = torch.nn.Sequential(*layers).requires_grad_(False).to("cpu")
    setattr(model, "is_loaded_in_8bit" if weights == "int8" else "is_loaded_in_4bit", True)
    return model


def run(model):
    import torch

    features = next(layer.in_features for layer in model.modules() if hasattr(layer, "in_features"))
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 2 * features).view(2, features))


def layers_of(model) -> list:
    return [layer for layer in model.modules() if hasattr(layer, "merged_adapters")]


def assert_merges_or_refuses(model, verb: str = "merge_adapter", tolerance: float = 0.1) -> None:
    """It has its effect when it is merged; or nothing is, and an error says that it cannot."""
    import torch

    expected = run(model)
    with model.disable_adapter():
        without = run(model)
    try:
        merged = getattr(model, verb)() or model
    except ValueError as error:
        assert re.search(REFUSED, str(error)), str(error)
        assert not any(layer.merged for layer in layers_of(model))
        assert torch.equal(run(model), expected), "it was merged in part"
        return
    found = run(merged)
    assert not torch.equal(found, without), "the output is that without the adapter"
    off = (found - expected).abs().max() / expected.abs().max()
    assert off < tolerance, f"merged, the output is {off:.0%} off"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Beft"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="optimum-quanto")
def test_weights_of_quanto(kind):
    assert_merges_or_refuses(adapted(q.layers("qint8"), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_not_quantized_is_not_merged_alone(kind):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), *q.layers("qint8")).requires_grad_(False)
    assert_merges_or_refuses(adapted(model, kind, ("0", "1", "2")))


@pytest.mark.parametrize("kind", ["C3A", "RandLora"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_8bit_weights(kind):
    assert_merges_or_refuses(adapted(bnb_layers("int8"), kind))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_4bit_weights():
    assert_merges_or_refuses(adapted(bnb_layers("nf4"), "RandLora"), tolerance=0.4)


@pytest.mark.parametrize("kind", ["Miss", "Bone", "Vera"])
@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_kinds_that_some_releases_of_peft_merge(kind, weights):
    assert_merges_or_refuses(adapted(bnb_layers(weights), kind), tolerance=0.4)


def test_what_is_merged_into_the_bias_only_is_merged():
    import torch

    model = adapted(q.layers("qint8"), "Beft")
    expected = run(model)
    model.merge_adapter()
    assert all(layer.merged for layer in layers_of(model))
    assert torch.allclose(run(model), expected, atol=1e-5)


def test_merge_and_unload():
    assert_merges_or_refuses(adapted(q.layers("qint8"), "HRA"), "merge_and_unload")


def test_an_adapter_on_plain_layers_only_is_merged():
    """Another adapter, on the layer of quanto, is not asked for."""
    import peft
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), q.layers("qint8")[0]).requires_grad_(False)
    model = adapted(model, "HRA", ["1"])
    model.add_adapter("plain", peft.HRAConfig(target_modules=["0"], **KINDS["HRA"]))
    model.base_model.set_adapter(["default", "plain"])
    expected = run(model)
    model.merge_adapter(["plain"])
    first, second = layers_of(model)
    assert (first.merged, second.merged) == (True, False)
    assert torch.allclose(run(model), expected, atol=1e-5)
    with pytest.raises(ValueError, match=REFUSED):
        model.merge_adapter(["default"])
    assert torch.allclose(run(model), expected, atol=1e-5)
    model.unmerge_adapter()
    assert torch.allclose(run(model), expected, atol=1e-5)


def test_the_way_that_the_error_names():
    import torch

    model = q.plain_layers()
    for plain, layer in zip(model, q.layers("qint8"), strict=True):
        plain.weight.data = layer.weight.dequantize()
    plain, packed = adapted(model, "HRA"), adapted(q.layers("qint8"), "HRA")
    expected = run(packed)
    plain.merge_adapter()
    assert torch.allclose(run(plain), expected, atol=1e-4)


def test_a_lora_is_still_merged():
    import peft
    import torch

    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, target_modules=["0", "1"], init_lora_weights=False)
    models = [q.layers("qint8"), bnb_layers("nf4")]
    if not unmet("peft>=0.14"):  # which knows bitsandbytes from 0.45 on
        models.append(bnb_layers("int8"))
    for model in models:
        assert_merges_or_refuses(peft.get_peft_model(model, config).eval(), tolerance=0.4)
        assert all(layer.merged for layer in layers_of(model))
