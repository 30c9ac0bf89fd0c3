"""peft-unilora-packed-weight: a UniLora has its effect on packed weights, and can be trained there."""

from __future__ import annotations

import pytest

from tests.fixes import packed_layers
from tests.fixes import quanto_models as q
from tests.fixes.test_peft_merge_other_adapters import REFUSED, bnb_layers
from tests.gate import unmet

FIX_ID = "peft-unilora-packed-weight"
peft = pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "has no effect|is not that of the dequantized model"
SIZE = 64
pytestmark = pytest.mark.skipif(not hasattr(peft, "UniLoraConfig"), reason="this peft has no UniLora")


def gguf_layers():
    import torch

    model = torch.nn.Sequential(*(packed_layers.gguf_linear("cpu", seed) for seed in (0, 1)))
    with torch.no_grad():
        for layer in model:
            layer.bias.zero_()
    return model.requires_grad_(False)


def torchao_layers():
    import torch

    return torch.nn.Sequential(*(packed_layers.torchao_linear("cpu", seed) for seed in (0, 1)))


PACKED = {"nf4": lambda: bnb_layers("nf4"), "int8": lambda: bnb_layers("int8"), "gguf": gguf_layers}
PLAIN_FOR_TORCH = {
    "qint8": lambda: q.layers("qint8"),
    "qint4": lambda: q.layers("qint4"),
    "qfloat8": lambda: q.layers("qfloat8"),
    "torchao": torchao_layers,
}
packed = pytest.mark.parametrize("weights", PACKED)


def adapted(model, **options):
    """``model`` with a UniLora whose effect is as large as the output."""
    import torch

    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported

    torch.manual_seed(1)
    config = peft.UniLoraConfig(r=8, target_modules=["0", "1"], init_weights=False, **options)
    return peft.get_peft_model(model.requires_grad_(False), config).eval()


def dequantized(model):
    """A plain model that computes what ``model`` computes."""
    import torch

    layers = []
    for layer in model:
        plain = torch.nn.Linear(layer.in_features, layer.out_features)
        with torch.no_grad():
            nothing = layer(torch.zeros(1, layer.in_features))[0]
            plain.weight.copy_((layer(torch.eye(layer.in_features)) - nothing).t())
            plain.bias.copy_(nothing)
        layers.append(plain)
    return torch.nn.Sequential(*layers).requires_grad_(False)


def given(model):
    import torch

    features = model.base_model.model[0].in_features
    return torch.linspace(-1, 1, 2 * features).view(2, features)


def run(model, dtype=None):
    import torch

    with torch.no_grad():
        return model(given(model).to(dtype)).float()


def assert_as_dequantized(model, **options) -> None:
    import torch

    plain = adapted(dequantized(model), **options)
    model = adapted(model, **options)
    expected, found = run(plain), run(model)
    with plain.disable_adapter():
        effect = float((expected - run(plain)).abs().max())
    with model.disable_adapter():
        assert not torch.equal(run(model), found), "the UniLora has no effect"
    off = float((found - expected).abs().max()) / effect
    assert off < 0.05, f"the output is not that of the dequantized model: {off:.0%} of the effect"


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_weights_of_bitsandbytes(weights):
    assert_as_dequantized(PACKED[weights]())


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.35", "gguf"))
def test_gguf_weights():
    assert_as_dequantized(gguf_layers())


@pytest.mark.parametrize("weights", PLAIN_FOR_TORCH)
def test_weights_that_torch_takes_for_plain_ones(weights):
    assert_as_dequantized(PLAIN_FOR_TORCH[weights]())


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
def test_4bit_weights_stored_as_numbers(storage):
    """As FSDP wants them."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    if sentence := unmet("bitsandbytes>=0.47"):
        pytest.skip(f"the CPU reads 4-bit weights in bytes only before; {sentence}")
    layers = [
        bnb.nn.Linear4bit(
            SIZE, SIZE, compute_dtype=torch.float32, quant_type="nf4", quant_storage=getattr(torch, storage)
        )
        for _ in range(2)
    ]
    assert_as_dequantized(torch.nn.Sequential(*layers).to("cpu"))


@packed
def test_half_precision(weights):
    import torch

    if weights == "gguf":
        pytest.skip("its layers here compute in float32")
    model = PACKED[weights]()
    expected = run(adapted(dequantized(model)))
    found = run(adapted(model), torch.bfloat16)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@packed
def test_training(weights):
    """The gradient of the vector is that on the dequantized model."""
    model = PACKED[weights]()
    gradients = []
    for one in (adapted(dequantized(model)), adapted(model)):
        one.train()
        one(given(one)).float().square().sum().backward()
        (gradient,) = [parameter.grad for parameter in one.parameters() if parameter.requires_grad]
        gradients.append(gradient)
    expected, found = gradients
    assert found.any()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@packed
def test_saved_and_loaded(tmp_path, weights):
    """Its indices and scales with it, or made again."""
    import torch

    for saves in (True, False):
        model = adapted(PACKED[weights](), save_indices=saves)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        base = model.base_model.model
        expected = run(model)
        model.save_pretrained(tmp_path / str(saves))
        again = torch.nn.Sequential(*(layer.get_base_layer() for layer in base))
        again = peft.PeftModel.from_pretrained(again, tmp_path / str(saves)).eval()
        assert torch.equal(run(again), expected)


@packed
def test_it_is_not_merged_into_packed_weights(weights):
    import torch

    model = adapted(PACKED[weights]())
    expected = run(model)
    with pytest.raises(ValueError, match=f"{REFUSED}|cannot be merged into GGUF weights"):
        model.merge_adapter()
    assert torch.equal(run(model), expected)


def test_a_plain_layer_stays_as_it_was():
    """The scales have the dtype of a half precision weight."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE)).half()
    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    config = peft.UniLoraConfig(target_modules=["0"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    assert model.base_model.model[0].unilora_scales_A["default"].dtype is torch.float16
