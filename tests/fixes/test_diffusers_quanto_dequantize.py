"""diffusers-quanto-dequantize: models of diffusers that quanto quantized cannot be dequantized."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q
from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import each_spelling as each_spelling

FIX_ID = "diffusers-quanto-dequantize"
NEEDS = ("optimum-quanto>=0.2.6", "diffusers>=0.33.0")  # what diffusers itself asks for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return q.saved_flux(tmp_path_factory.mktemp("flux"))


@pytest.mark.defect(FIX_ID, shows=r"has no implementation of `dequantize`", needs=NEEDS)
def test_a_model_is_dequantized(folder):
    import torch

    for weights in ("float8", "int4"):
        model = q.load_flux(folder, weights)
        reference = q.run_flux(model)
        model.dequantize()
        assert not [name for name, layer in model.named_modules() if type(layer).__name__ == "QLinear"]
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
        assert q.error(q.run_flux(model), reference) < 0.005


def test_a_layer_with_two_names_stays_one_layer():
    """And modes, devices and the bias, or that there is none, are those of the quantized layer."""
    import torch

    from diffusers_quantfix.models.quanto_layers import dequantized

    library = q.quanto()
    model = torch.nn.Module()
    model.first = torch.nn.Linear(64, 64, bias=False)
    model.block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    library.quantize(model, weights=library.qint8)
    library.freeze(model)
    model.second = model.first
    model.eval()
    weight = model.first.weight.dequantize()
    assert dequantized(model) is model
    assert type(model.first) is torch.nn.Linear and model.second is model.first and model.first.bias is None
    assert torch.equal(model.first.weight, weight)
    assert type(model.block[0]) is torch.nn.Linear and model.block[0].bias is not None
    assert not model.first.training and (model.first.in_features, model.first.out_features) == (64, 64)
    assert type(dequantized(q.layers("qint4")[0])) is torch.nn.Linear


def test_an_offloaded_model_says_what_to_do():
    import torch
    from accelerate import cpu_offload

    from diffusers_quantfix.models.quanto_layers import dequantized

    model = cpu_offload(q.layers("qint8"), torch.device("cpu"))
    for part in (model, model[0]):
        with pytest.raises(
            ValueError, match=r"is offloaded, and .* call it before offloading is enabled, or remove"
        ):
            dequantized(part)
    assert type(model[0]).__name__ == "QLinear", "nothing was changed"


def test_weights_on_meta_are_no_weights():
    from diffusers_quantfix.models.quanto_layers import dequantized

    model = q.layers("qint8").to("meta")
    with pytest.raises(ValueError, match="is offloaded"):
        dequantized(model)
    assert type(model[0]).__name__ == "QLinear"


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("level", ["LEAF", "BLOCK"])
def test_a_group_offloaded_model_says_so_too_and_goes_on(gpu, folder, level):
    import torch

    pytest.importorskip(
        "diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0"
    )
    from tests.fixes import group_offloaded

    device = gpu.devices[0]
    model = q.load_flux(folder, "int8")
    group_offloaded.offload(model, device, getattr(group_offloaded, level))
    expected = q.run_flux(model, device)
    with pytest.raises(
        ValueError, match=r"is offloaded, and .* call it before offloading is enabled, or remove"
    ):
        model.dequantize()

    def check(latents):
        assert torch.equal(latents, expected)

    check(q.run_flux(model, device))
    assert_goes_on(lambda: q.run_flux(model, device), check)
    group_offloaded.stop(model)
    model.to(device).dequantize()
    assert q.error(q.run_flux(model, device), expected) < 0.005


def test_a_hook_that_aligns_inputs_goes_along():
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from diffusers_quantfix.models.quanto_layers import dequantized

    model = q.layers("qint8")
    reference = q.run(model)
    hook = AlignDevicesHook(torch.device("cpu"), io_same_device=True)
    add_hook_to_module(model[0], hook)
    dequantized(model)
    assert model[0]._hf_hook is hook and type(model[0]) is torch.nn.Linear
    assert q.error(q.run(model), reference) < 1e-5
