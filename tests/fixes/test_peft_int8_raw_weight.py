"""peft-int8-raw-weight: adapters that take 8-bit numbers for the weight are not added to 8-bit layers."""

from __future__ import annotations

import re
import sys

import pytest

from diffusers_quantfix.fixes.peft import int8_raw_weight
from tests.fixes.test_peft_merge_other_adapters import bnb_layers, run
from tests.gate import unmet

FIX_ID = "peft-int8-raw-weight"
peft = pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "the output is .* times too large|expected m1 and m2 to have the same dtype"
REFUSED = r"a \w+ adapter with init_weights=.* cannot be added to '\d', an 8-bit layer: "
NEEDS = "bitsandbytes>=0.46"
KINDS = {
    "HRA": ("HRA", {"r": 8}),
    "PEANuT": ("Peanut", {"r": 8, "init_weights": False}),
    "MiSS bat": ("Miss", {"r": 8, "init_weights": "bat"}),
    "Bone bat": ("Bone", {"r": 8, "init_weights": "bat"}),
}
WORKING = {
    "MiSS": ("Miss", {"r": 8}),
    "Bone": ("Bone", {"r": 8}),
    "LoRA": ("Lora", {"r": 8}),
    "C3A": ("C3A", {"block_size": 16}),
}


def config_of(kind: str, targets=("0", "1")):
    name, options = {**KINDS, **WORKING}[kind]
    made = getattr(peft, f"{name}Config", None)
    if made is None:
        pytest.skip(f"this peft has no {name}")
    return made(target_modules=targets if isinstance(targets, str) else list(targets), **options)


def assert_not_too_large(model, config) -> None:
    """The output is of the order of that without the adapter; or nothing is added, and an error says why."""
    import torch

    expected = run(model)
    before = {name: id(module) for name, module in model.named_modules()}
    torch.manual_seed(1)
    try:
        adapted = peft.get_peft_model(model, config).eval()
    except ValueError as error:
        assert re.search(REFUSED, str(error)), str(error)
        assert {name: id(module) for name, module in model.named_modules()} == before
        assert torch.equal(run(model), expected)
        return
    times = run(adapted).abs().max() / expected.abs().max()
    assert times < 50, f"the output is {times:.0f} times too large"


def test_after_an_interrupted_import_of_peft(monkeypatch):
    """Python gives a package no attribute for a submodule that was imported in its first, interrupted import."""
    tuners = peft.tuners
    kinds = [kind for kind, *_ in int8_raw_weight._KINDS if f"peft.tuners.{kind}" in sys.modules]
    assert int8_raw_weight.broken(tuners)
    for kind in kinds:
        monkeypatch.delattr(tuners, kind)
    assert int8_raw_weight.broken(tuners)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_hra():
    assert_not_too_large(bnb_layers("int8"), config_of("HRA"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "HRA"])
def test_kinds_of_some_releases(kind):
    assert_not_too_large(bnb_layers("int8"), config_of(kind))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_a_plain_layer_before_it_stays():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), *bnb_layers("int8")).requires_grad_(False)
    assert_not_too_large(model, config_of("HRA", ("0", "1")))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_targets_as_a_pattern():
    assert_not_too_large(bnb_layers("int8"), config_of("HRA", "[01]"))


@pytest.mark.parametrize("kind", WORKING)
def test_kinds_that_work_are_added(kind):
    if kind == "LoRA" and unmet("peft>=0.14"):
        pytest.skip("peft before 0.14 does not know the 8-bit layers of bitsandbytes 0.45 and later")
    model = bnb_layers("int8")
    expected = run(model).abs().max()
    adapted = peft.get_peft_model(model, config_of(kind)).eval()
    assert hasattr(adapted.base_model.model[1], "base_layer")
    assert run(adapted).abs().max() < 50 * expected


def test_plain_layers_of_an_8bit_model():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), *bnb_layers("int8")).requires_grad_(False)
    adapted = peft.get_peft_model(model, config_of("HRA", ["0"])).eval()
    assert [hasattr(layer, "base_layer") for layer in adapted.base_model.model] == [True, False, False]
    assert torch.isfinite(run(adapted)).all()


def test_a_second_adapter_and_the_first_goes_on():
    """On another layer than the first; it is not added, and can be added to where it works."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), *bnb_layers("int8")).requires_grad_(False)
    adapted = peft.get_peft_model(model, config_of("HRA", ["0"])).eval()
    expected = run(adapted)
    with pytest.raises(ValueError, match=REFUSED):
        adapted.add_adapter("second", config_of("HRA", ["0", "1"]))
    assert torch.equal(run(adapted), expected)
    adapted.add_adapter("third", config_of("HRA", ["0"]))
    assert "third" in adapted.peft_config


def test_a_state_dict_names_the_layers():
    """Targets are those of the state dict then, not those of the config."""
    import torch

    if unmet("peft>=0.17"):
        pytest.skip("before 0.17 no adapter is injected by the names of a state dict")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), *bnb_layers("int8")).requires_grad_(False)
    with pytest.raises(ValueError, match=REFUSED):
        peft.inject_adapter_in_model(config_of("HRA", ["0"]), model, state_dict={"1.hra_u": None})
    assert type(model[0]) is torch.nn.Linear
    peft.inject_adapter_in_model(config_of("HRA", ["0"]), model, state_dict={"0.hra_u": None})
    assert hasattr(model[0], "base_layer")


def test_the_way_that_the_error_names():
    """A model that has been dequantized takes the adapter."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    model = bnb_layers("int8")
    expected = run(model)
    if not hasattr(bnb.functional, "int8_vectorwise_dequant"):
        pytest.skip("this bitsandbytes has no function that dequantizes int8")
    plain = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in model)).requires_grad_(False)
    for layer, packed in zip(plain, model, strict=True):
        weight = packed.weight if packed.state.CB is None else packed.state
        values = packed.weight.data if packed.state.CB is None else packed.state.CB
        layer.weight.data = bnb.functional.int8_vectorwise_dequant(values, weight.SCB).float()
        layer.bias.data = packed.bias.data.float()
    adapted = peft.get_peft_model(plain, config_of("HRA")).eval()
    assert torch.allclose(run(adapted), expected.float(), atol=0.05)


def four_bit_layers():
    """Packed, as a checkpoint has them: no kernel is needed."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    layers = [bnb.nn.Linear4bit(64, 64, quant_type="nf4") for _ in range(2)]
    for layer in layers:
        packed = torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8)
        layer.weight = bnb.nn.Params4bit(packed, requires_grad=False, quant_type="nf4", bnb_quantized=True)
    return torch.nn.Sequential(*layers).requires_grad_(False)


def gguf_layers():
    import torch

    gguf = pytest.importorskip("gguf")
    utils = pytest.importorskip("diffusers.quantizers.gguf.utils", reason="diffusers is too old for GGUF")
    layers = [utils.GGUFLinear(64, 64, compute_dtype=torch.float32) for _ in range(2)]
    for layer in layers:
        packed = torch.zeros(64, 68, dtype=torch.uint8)
        layer.weight = utils.GGUFParameter(packed, quant_type=gguf.GGMLQuantizationType.Q8_0)
    return torch.nn.Sequential(*layers).requires_grad_(False)


PACKED = {"4-bit": four_bit_layers, "GGUF": gguf_layers}


@pytest.mark.defect(FIX_ID, shows="shapes cannot be multiplied|DID NOT RAISE", needs="bitsandbytes")
@pytest.mark.parametrize("layers", PACKED)
def test_packed_layers(layers):
    """Without the fix nothing is said before the first run."""
    import torch

    model = PACKED[layers]()
    with pytest.raises(
        ValueError, match=f"cannot be added to '0', a {layers} layer: .* the first run would fail"
    ):
        peft.get_peft_model(model, config_of("HRA")).eval()(torch.randn(2, 64))
    assert not any(hasattr(layer, "base_layer") for layer in model)


@pytest.mark.parametrize("layers", PACKED)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "HRA"])
def test_packed_layers_and_kinds_of_some_releases(layers, kind):
    """Where the release computes with the numbers of the weight; elsewhere the adapter is added."""
    model = PACKED[layers]()
    try:
        adapted = peft.get_peft_model(model, config_of(kind))
    except ValueError as error:
        assert f"a {layers} layer: " in str(error), str(error)
        assert not any(hasattr(layer, "base_layer") for layer in model)
        return
    except (AttributeError, RuntimeError):
        return  # the release fails itself when it is added
    assert kind == "MiSS bat", f"a {kind} was added to {adapted}"


def test_a_4bit_layer_that_is_not_packed_yet_works():
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64), bnb.nn.Linear4bit(64, 64)).requires_grad_(False)
    adapted = peft.get_peft_model(model, config_of("HRA")).eval()
    assert torch.isfinite(adapted(torch.randn(2, 64))).all()


def test_plain_weights_of_a_gguf_file_work():
    import torch

    model = gguf_layers()
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFParameter

    for layer in model:
        layer.weight = GGUFParameter(torch.randn(64, 64), quant_type=gguf.GGMLQuantizationType.F32)
    peft.get_peft_model(model, config_of("HRA"))
