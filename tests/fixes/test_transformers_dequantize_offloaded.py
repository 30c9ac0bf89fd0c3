"""transformers-dequantize-offloaded: dequantizing an offloaded text encoder breaks it."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit_models, four_bit, group_offloaded
from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.offloaded import offload_model
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")

FIX_ID = "transformers-dequantize-offloaded"
# The last one: there a 4-bit or 8-bit weight cannot even be offloaded (bnb-param-kwargs).
SHOWS = (
    r"Cannot copy out of meta tensor; no data!|DID NOT RAISE|same device|same GPU|Expected a cuda device"
    r"|expected device meta|unexpected keyword argument '(_is_hf_initialized|hooks)'"
    r"|^AssertionError:\s*$"  # of double_quant in bitsandbytes before 0.45: the tensor is on no CUDA device
)
REFUSED = r"is offloaded, and dequantize\(\) would leave it broken: call it before"


def load(tmp_path, bits):
    from transformers import T5EncoderModel

    folder = tmp_path / "plain"
    if not folder.exists():
        models.t5_encoder().save_pretrained(folder)
    return four_bit.load(T5EncoderModel, folder, bits=bits)


def assert_refused(model) -> None:
    layers, attributes, config = list(model.modules()), set(vars(model)), model.config.to_dict()
    with pytest.raises(ValueError, match=REFUSED):
        model.dequantize()
    assert list(map(id, model.modules())) == list(map(id, layers))
    assert set(vars(model)) == attributes and model.config.to_dict() == config


def _needs_an_older_bitsandbytes() -> bool:
    import inspect

    import bitsandbytes
    from transformers.integrations import bitsandbytes as integration

    name = "double_quant"
    return name in inspect.getsource(integration) and not hasattr(bitsandbytes.functional, name)


def skip_where_it_does_not_run(bits, way) -> None:
    if bits == 8 and _needs_an_older_bitsandbytes():
        pytest.skip("this transformers dequantizes 8 bits by a function that bitsandbytes has no more")
    if way == "group" and not unmet("transformers>=5") and unmet("diffusers>=0.36"):
        pytest.skip("group offloading of T5 of transformers 5 came with diffusers 0.36")


@pytest.mark.parametrize("way", ["sequential", "group"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_refused(gpu, tmp_path, bits, way):
    skip_where_it_does_not_run(bits, way)
    model = load(tmp_path, bits)
    offload_model(model, gpu.devices[0], way)
    assert_refused(model)


@pytest.mark.parametrize("way", ["sequential", "group"])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_runs_on_and_is_dequantized_when_the_hooks_are_off(gpu, tmp_path, bits, way):
    from accelerate.hooks import remove_hook_from_module

    skip_where_it_does_not_run(bits, way)
    device = gpu.devices[0]
    model = load(tmp_path, bits)
    offload_model(model, device, way)
    before = eight_bit_models.encode(model, device)
    assert_refused(model)

    def check(states):
        assert torch.equal(states, before)

    check(eight_bit_models.encode(model, device))
    assert_goes_on(lambda: eight_bit_models.encode(model, device), check)
    if way == "sequential":
        remove_hook_from_module(model, recurse=True)
    else:
        group_offloaded.stop(model)
    torch.nn.Module.to(model, device)
    reference = load(tmp_path, bits)
    for one in (model, reference):
        one.dequantize()
    assert torch.equal(eight_bit_models.encode(model, device), eight_bit_models.encode(reference, device))


def test_layers_that_are_not_quantized_may_be_offloaded(gpu, tmp_path):
    """As with ``llm_int8_enable_fp32_cpu_offload``."""
    from accelerate import cpu_offload

    model = load(tmp_path, 4)
    cpu_offload(model.encoder.final_layer_norm, gpu.devices[0])
    model.dequantize()
    assert not four_bit.layers_of(model)
