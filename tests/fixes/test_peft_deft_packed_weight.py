"""peft-deft-packed-weight: a new DEFT changes nothing on packed layers, as on plain ones, and can be trained."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, packed_layers
from tests.fixes.test_peft_merge_other_adapters import REFUSED, bnb_layers
from tests.gate import unmet

FIX_ID = "peft-deft-packed-weight"
peft = pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "the output is off|shapes cannot be multiplied|The size of tensor a"
pytestmark = pytest.mark.skipif(not hasattr(peft, "DeftConfig"), reason="this peft has no DEFT")
METHODS = pytest.mark.parametrize("method", ["qr", "relu"])


def gguf_layers():
    import torch

    layers = [packed_layers.gguf_linear("cpu", seed) for seed in (0, 1)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def given(model, device="cpu"):
    import torch

    features = next(layer.in_features for layer in model.modules() if hasattr(layer, "in_features"))
    return torch.linspace(-1, 1, 2 * features, device=device).view(2, features)


def run(model, device="cpu"):
    import torch

    with torch.no_grad():
        return model(given(model, device)).float().cpu()


def adapted(model, method: str = "qr", **options):
    import torch

    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    torch.manual_seed(1)
    config = peft.DeftConfig(r=8, target_modules=["0", "1"], decomposition_method=method, **options)
    return peft.get_peft_model(model, config).eval()


def assert_changes_nothing(model, method: str = "qr", device="cpu") -> None:
    expected = run(model, device)
    off = (run(adapted(model, method).to(device), device) - expected).abs().max() / expected.abs().max()
    assert off < 0.03, f"the output is off by {off:.0%}"


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
@METHODS
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_weights_of_bitsandbytes(weights, method):
    assert_changes_nothing(bnb_layers(weights), method)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.35", "gguf"))
@METHODS
def test_gguf_weights(method):
    assert_changes_nothing(gguf_layers(), method)


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_on_a_device(gpu, weights):
    import torch

    here = gpu.devices[0]
    if weights == "nf4":
        layers = torch.nn.Sequential(*(four_bit.linear(here, seed=seed) for seed in (0, 1)))
    else:
        layers = torch.nn.Sequential(*(packed_layers.eight_bit_linear(here, seed) for seed in (0, 1))).half()
    expected = layers[0].weight.device
    model = adapted(layers.requires_grad_(False)).to(here)
    assert model.base_model.model[0].get_base_layer().weight.device == expected
    assert model.base_model.model[0].deft_R["default"].device == expected
    assert torch.isfinite(model.base_model.model[0].deft_R["default"]).all()


def test_a_layer_that_has_run():
    """Its scales are in its state then."""
    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(sentence)
    model = bnb_layers("int8")
    run(model)
    weight = model[0].weight
    assert_changes_nothing(model)
    assert model[0].get_base_layer().weight.data.equal(weight.data)


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_saved_and_loaded(tmp_path, weights):
    import torch

    model = adapted(bnb_layers(weights))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    expected = run(model)
    model.save_pretrained(tmp_path)
    bases = torch.nn.Sequential(*(layer.get_base_layer() for layer in model.base_model.model))
    assert torch.equal(run(peft.PeftModel.from_pretrained(bases, tmp_path).eval()), expected)


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_it_is_not_merged_into_packed_weights(weights):
    import torch

    model = adapted(bnb_layers(weights))
    expected = run(model)
    with pytest.raises(ValueError, match=REFUSED):
        model.merge_adapter()
    assert torch.equal(run(model), expected)


def test_plain_layers():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
    assert_changes_nothing(model)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
    adapted(model, para=True)  # which has no R


@pytest.mark.parametrize("layer", ["4 bits", "8 bits", "trained in 8 bits"])
def test_a_layer_that_is_not_packed_yet(layer):
    """Built, and not moved to a device: its weight holds plain numbers, and R is that of a plain layer."""
    import torch

    nn = pytest.importorskip("bitsandbytes").nn
    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    made = {
        "4 bits": lambda: nn.Linear4bit(64, 64),
        "8 bits": lambda: nn.Linear8bitLt(64, 64, has_fp16_weights=False),
        "trained in 8 bits": lambda: nn.Linear8bitLt(64, 64),
    }[layer]()
    plain = torch.nn.Linear(64, 64)
    plain.weight.data.copy_(made.weight.data)
    found = []
    for one in (plain, made):
        torch.manual_seed(1)
        model = peft.get_peft_model(torch.nn.Sequential(one), peft.DeftConfig(r=2, target_modules=["0"]))
        found.append(model.base_model.model[0].deft_R["default"].detach().float())
    assert torch.equal(*found)
