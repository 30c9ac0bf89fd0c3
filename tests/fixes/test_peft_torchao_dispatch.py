"""peft-torchao-dispatch: LoRAs on weights of torchao, and beside a torchao that peft refuses."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models as lora
from tests.fixes import torchao_models as ao
from tests.fixes.merged import assert_same, bits, layers_of
from tests.gate import unmet
from tests.rig import models

FIX_ID = "peft-torchao-dispatch"
SHOWS = (
    r"missing 1 required keyword-only argument: 'get_apply_tensor_subclass'|"
    r"cannot import name 'LinearActivationQuantizedTensor'|Found an incompatible version of torchao|"
    r"attempting to run unimplemented operator/function: .{0,40}aten\.add_"
)
pytestmark = pytest.mark.skipif(
    bool(unmet("peft>=0.14") or unmet("torchao")), reason="needs torchao, and peft 0.14, which knows it first"
)
OLD = bool(unmet("torchao>=0.16")) and not unmet("peft>=0.19")  # the pairs that peft refuses
known = pytest.mark.skipif(OLD, reason="peft takes no weights of this torchao")


def _pipeline(weights: str = "", **options):
    """A Flux whose transformer is plain, or quantized as a user does it."""
    quantization = pytest.importorskip("torchao.quantization")
    model = models.flux_transformer(**options).bfloat16()
    if weights:
        quantization.quantize_(model, ao.config(weights))
    return models.flux_pipeline(model)


def _run(pipe, device="cpu"):
    import torch

    return models.call_flux(pipe, device, torch.bfloat16).float().cpu()


def _assert_acts(pipe, weights: str, device="cpu") -> None:
    """The LoRA of a pipeline changes its output by what it changes that of an unquantized one."""
    import torch

    plain = _pipeline()
    without = _run(plain)
    plain.load_lora_weights(lora.weights(1), adapter_name="one")
    wanted = _run(plain) - without
    pipe.disable_lora()
    without = _run(pipe, device)
    pipe.enable_lora()
    change = _run(pipe, device) - without
    alike = torch.nn.functional.cosine_similarity(change.flatten(), wanted.flatten(), dim=0)
    assert alike > (0.7 if weights == "int4" else 0.95), f"its effect is another one ({alike:.3f})"


@known
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="peft<0.20")
def test_after_quantize():
    import torch

    pipe = _pipeline("int8")
    without = _run(pipe)
    pipe.load_lora_weights(lora.weights(1), adapter_name="one")
    _assert_acts(pipe, "int8")
    pipe.unload_lora_weights()
    assert torch.equal(_run(pipe), without)


@pytest.mark.skipif(
    not OLD and (not unmet("peft>=0.19") or bool(unmet("torchao>=0.18"))),
    reason="plain models load LoRAs here",
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_plain_model():
    pipe = _pipeline()
    pipe.load_lora_weights(lora.weights(1), adapter_name="one")
    _assert_acts(pipe, "")
    pipe.fuse_lora()
    pipe.unfuse_lora()


@known
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="peft<0.19")
def test_fused_into_float8(gpu):
    import torch

    here = gpu.devices[0]
    model = ao.adapted("float8", here, any_layer=True)
    with_lora, before = ao.run(model, here), bits(model)
    model.merge_adapter()
    assert lora.distance(ao.run(model, here), with_lora) < 0.06 * with_lora.abs().max()
    model.unmerge_adapter()
    assert torch.equal(ao.run(model, here), with_lora)
    assert_same(bits(model), before)


@pytest.mark.skipif(not OLD, reason="peft takes weights of this torchao")
def test_weights_that_peft_refuses_are_refused():
    pipe = _pipeline("float8")
    with pytest.raises(ImportError, match="Found an incompatible version of torchao"):
        pipe.load_lora_weights(lora.weights(1), adapter_name="one")


@known
@pytest.mark.parametrize("weights", [*ao.WEIGHTS, "int4"])
def test_one_step_further(gpu, tmp_path, weights):
    """Two LoRAs, saved and loaded again, offloaded, and merged: which is refused before anything is changed."""
    import torch

    pipe = _pipeline(weights)
    with torch.no_grad():
        pipe.load_lora_weights(lora.weights(1), adapter_name="one")
    _assert_acts(pipe, weights)
    with_one = _run(pipe)
    pipe.load_lora_weights(lora.weights(2), adapter_name="two")
    pipe.set_adapters(["one", "two"], [1.0, 0.5])
    assert lora.distance(_run(pipe), with_one) > 0
    pipe.delete_adapters("two")
    pipe.set_adapters(["one"])
    assert torch.equal(_run(pipe), with_one)

    before = bits(pipe.transformer)
    with pytest.raises(ValueError, match=r"quantize_|get_apply_tensor_subclass"):
        pipe.fuse_lora()
    assert not any(part.merged for part in layers_of(pipe.transformer))
    assert_same(bits(pipe.transformer), before)
    assert torch.equal(_run(pipe), with_one)

    pipe.save_lora_weights(tmp_path, _weights_of(pipe))
    again = _pipeline(weights)
    again.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors", adapter_name="one")
    assert torch.equal(_run(again), with_one)
    here = gpu.devices[0]
    again.enable_model_cpu_offload(device=here)
    assert lora.distance(_run(again, here), with_one) < 0.1 * with_one.abs().max()


def _weights_of(pipe):
    from peft.utils import get_peft_model_state_dict

    return get_peft_model_state_dict(pipe.transformer, adapter_name="one")


@known
def test_trained():
    """What peft's own issue asks for: the factors of a LoRA get gradients, the weight stays."""
    import torch
    from peft import LoraConfig

    model = models.flux_transformer().bfloat16()
    pytest.importorskip("torchao.quantization").quantize_(model, ao.config("int8"))
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"]))
    layer = model.transformer_blocks[0].attn.to_q
    layer(torch.randn(1, 3, 64, dtype=layer.lora_A["default"].weight.dtype)).sum().backward()
    assert layer.lora_B["default"].weight.grad is not None
    assert layer.base_layer.weight.grad is None


@known
def test_a_bias_of_the_lora_stays_possible():
    """peft's layer for torchao takes none, its layer of plain weights, which float8 had before 0.19, does."""
    import torch
    from peft import LoraConfig, get_peft_model

    if sentence := unmet("peft<0.19"):
        pytest.skip(sentence)
    model = ao.layers("float8")
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["0"], lora_bias=True))
    assert torch.isfinite(ao.run(peft)).all()


@known
def test_nothing_to_merge_is_no_error():
    for layer in layers_of(ao.adapted("int8")):
        layer.get_apply_tensor_subclass = None
        layer.merge(adapter_names=[])
        assert not layer.merged
