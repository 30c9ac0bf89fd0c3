"""peft-dora-8bit-cpu, peft-dora-gguf and peft-dora-4bit-hooked: DoRA adapters for quantized weights."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, gguf_models, lora_models
from tests.fixes.callers import assert_goes_on
from tests.fixes.four_bit import skip_for_other_reasons
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

ON_META = r"on meta|Cannot copy out of meta tensor|[Mm]eta"
SIZES = r"The size of tensor a \(36\) must match the size of tensor b \(64\)"


def adapters(model, **options):
    """A DoRA for the attention of ``model``, as one who trains puts it in."""
    import torch
    from peft import LoraConfig

    targets = [name for name, _ in model.named_modules() if name.endswith(("to_q", "to_v", "0", "1"))]
    targets = [name for name in targets if hasattr(model.get_submodule(name), "in_features")]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, use_dora=True), adapter_name="one", **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def eight_bit_layers():
    """Two quantized layers on the CPU."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    if unmet("bitsandbytes>=0.46"):
        pytest.skip("bitsandbytes quantizes on a CPU from 0.46 on")
    torch.manual_seed(0)
    layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2)]
    return torch.nn.Sequential(*layers).to("cpu").requires_grad_(False)


def call(model):
    import torch

    torch.manual_seed(2)
    with torch.no_grad():
        return model(torch.randn(3, 64))


@pytest.mark.defect("peft-dora-8bit-cpu", shows=ON_META)
@pytest.mark.parametrize("how", ["peft", "accelerate"])
def test_an_8bit_layer_on_the_cpu_keeps_its_weight(how):
    """The two ways in which adapters are put in without memory for them: the weight of the layer is no adapter."""
    import contextlib

    import accelerate
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils import get_peft_model_state_dict

    def with_dora(empty):
        options = {"low_cpu_mem_usage": True} if empty and how == "peft" else {}
        context = (
            accelerate.init_empty_weights() if empty and how == "accelerate" else contextlib.nullcontext()
        )
        model = eight_bit_layers()
        with context:
            return inject_adapter_in_model(
                LoraConfig(r=4, target_modules=["0", "1"], use_dora=True, init_lora_weights=False),
                model,
                **options,
            )

    try:
        whole, empty = with_dora(False), with_dora(True)
    except AssertionError as error:
        pytest.skip(f"peft dequantizes on a GPU only: {error}")
    weights = [empty.get_submodule(name).base_layer.weight for name in ("0", "1")]
    assert not any(weight.is_meta for weight in weights), "a weight of the model is on meta"
    if how == "accelerate":
        return
    set_peft_model_state_dict(empty, get_peft_model_state_dict(whole), low_cpu_mem_usage=True)
    assert (call(empty) - call(whole)).abs().max() == 0


@pytest.mark.defect(
    "peft-dora-8bit-cpu", shows=ON_META, needs=("diffusers>=0.42", "bitsandbytes>=0.46", "peft>=0.20")
)
@pytest.mark.parametrize("offload", ["model", "sequential", "group"])
def test_into_an_offloaded_pipeline(gpu, tmp_path, offload):
    """Saved by diffusers and loaded by its documented call: exact against a model that was never offloaded."""
    import torch
    from diffusers import FluxPipeline, FluxTransformer2DModel
    from peft.utils import get_peft_model_state_dict

    models.saved(models.flux_transformer(), tmp_path / "flux")

    def pipeline():
        with skip_for_other_reasons():
            return models.flux_pipeline(
                models.load_quantized(FluxTransformer2DModel, tmp_path / "flux", bits=8)
            )

    device = torch.device("cuda")
    trained = adapters(pipeline().transformer)
    FluxPipeline.save_lora_weights(tmp_path, get_peft_model_state_dict(trained, adapter_name="one"))
    whole = pipeline()
    whole.transformer.to(device)
    whole.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    expected = lora_models.run(whole, device, torch.float16)

    pipe = pipeline()
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.transformer.enable_group_offload(device, offload_type="leaf_level")
    before = lora_models.run(pipe, device, torch.float16)
    assert lora_models.distance(expected, before) > 0.05
    pipe.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")

    def check(output):
        assert lora_models.distance(output, expected) == 0

    if offload != "sequential":  # that is accelerate-parameter-containers
        for _ in range(2):
            check(lora_models.run(pipe, device, torch.float16))
        # At its end model offload moves all back with the hooks off.
        parts = (0.3, 0.5) if offload == "model" else (0.3, 0.8)
        assert_goes_on(lambda: lora_models.run(pipe, device, torch.float16), check, parts)
    pipe.unload_lora_weights()
    assert lora_models.distance(lora_models.run(pipe, device, torch.float16), before) == 0


@pytest.mark.defect("peft-dora-gguf", shows=SIZES)
def test_a_gguf_model(tmp_path):
    """The norms are those of the dequantized weights: a fresh DoRA changes nothing, a trained one does."""
    import torch
    from peft import LoraConfig

    model = gguf_models.transformer(tmp_path)
    before = gguf_models.run(model)
    targets = [name for name, _ in model.named_modules() if name.endswith(("to_q", "to_v"))]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, use_dora=True), adapter_name="one")
    assert lora_models.distance(gguf_models.run(model), before) < 1e-5
    assert all(weight.dtype == torch.uint8 for weight in gguf_models.weights_of(model)), "they stay packed"
    model.delete_adapters("one")

    adapters(model)
    with_dora = gguf_models.run(model)
    assert lora_models.distance(with_dora, before) > 0.05
    model.disable_adapters()
    assert lora_models.distance(gguf_models.run(model), before) == 0


def test_a_gguf_model_beside_the_plain_one(tmp_path):
    """Another dtype than float32, and the numbers of the same model without quantization."""
    import torch

    gguf_utils = pytest.importorskip("diffusers.quantizers.gguf.utils", reason="this diffusers has no GGUF")
    dequantize_gguf_tensor = gguf_utils.dequantize_gguf_tensor
    model = gguf_models.transformer(tmp_path, compute_dtype=torch.bfloat16)
    weight = model.transformer_blocks[0].attn.to_q.weight
    plain = dequantize_gguf_tensor(weight).to(torch.bfloat16)
    adapters(model)
    layer = model.transformer_blocks[0].attn.to_q
    norms = layer.lora_magnitude_vector["one"].weight
    assert (norms.float() - plain.float().norm(dim=1)).abs().max() < 0.02 * norms.abs().max()


def hooked(since: str):
    needs = (since, "bitsandbytes>=0.46")
    return pytest.mark.defect("peft-dora-4bit-hooked", shows="cannot pickle", needs=needs)


# The hooks of diffusers before 0.35 can be copied, but for a stream.
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(False, marks=hooked("diffusers>=0.35")),
        pytest.param(True, marks=hooked("diffusers>=0.33")),
    ],
)
def test_a_4bit_layer_under_group_offload(gpu, stream):
    """A fresh DoRA changes nothing, and the copy that peft makes takes no hook with it."""
    import torch
    from diffusers.hooks import apply_group_offloading
    from peft import LoraConfig, inject_adapter_in_model

    here = torch.device("cuda")
    model = four_bit.stack("cpu").requires_grad_(False)
    apply_group_offloading(model, here, offload_type="leaf_level", use_stream=stream)
    weight, hook = model[0].weight, model[0]._diffusers_hook
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "2"], use_dora=True), model)
    layer = model[0].base_layer
    assert layer.weight is weight and layer._diffusers_hook is hook
    off = (four_bit.run(layer, here) - four_bit.run(four_bit.linear(here, seed=0), here)).abs().max()
    assert off < 1e-5, f"the layer below is off by {off}"
