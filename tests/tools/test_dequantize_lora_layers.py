"""`dequantize_lora_layers`: a LoRA is fused into a GGUF model whose other layers stay packed."""

from __future__ import annotations

import copy

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.placement.released import ReleasedError
from tests.fixes import gguf_models, lora_models
from tests.fixes.merged import OFFLOADS
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")
torch = pytest.importorskip("torch")

TRANSFORMER = ["transformer"]
LAYERS = 7  # of the tiny transformer; the LoRA of `lora_models` is for these


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def pipeline(folder, *loras: str, **options):
    """A pipeline whose GGUF transformer has these LoRAs."""
    pipe = models.flux_pipeline(gguf_models.transformer(folder, **options))
    return lora_models.load(pipe, *loras) if loras else pipe


def dequantize(pipe, device):
    """Dequantize the whole transformer; before diffusers 0.40 only on an accelerator."""
    pipe.to(device)
    pipe.transformer.dequantize()
    return pipe.to("cpu")


def run(pipe, dtype=torch.float32, device="cpu"):
    return lora_models.run(pipe, device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", ["F32", "BF16"])
def test_the_result_is_that_of_a_dequantized_model(gpu, folder, tmp_path, dtype, rest):
    device = gpu.devices[0]
    folder, options = folder if rest == "F32" else tmp_path, {"compute_dtype": dtype, "rest": rest}
    pipe = pipeline(folder, "one", "two", **options)
    before, packed = run(pipe, dtype), len(gguf_models.weights_of(pipe.transformer))
    assert qf.dequantize_lora_layers(pipe) == LAYERS
    assert len(gguf_models.weights_of(pipe.transformer)) == packed - LAYERS > 0
    assert torch.equal(run(pipe, dtype), before)
    pipe.fuse_lora(components=TRANSFORMER, lora_scale=0.7)
    fused = run(pipe, dtype)
    other = dequantize(pipeline(folder, "one", "two", **options), device)
    other.fuse_lora(components=TRANSFORMER, lora_scale=0.7)
    assert torch.equal(run(other, dtype), fused)
    assert not torch.equal(fused, before)
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe, dtype), fused)
    dequantize(pipe, device)
    assert not gguf_models.weights_of(pipe.transformer)
    assert torch.equal(run(pipe, dtype), fused)


def test_it_is_the_lora_of_the_packed_model(folder):
    """Fused, unfused and fused again; then another LoRA."""
    pipe = pipeline(folder, "one")
    with_lora = run(pipe)
    qf.dequantize_lora_layers(pipe)
    for _ in range(2):
        pipe.fuse_lora(components=TRANSFORMER)
        assert all(layer.merged for layer in pipe.transformer.modules() if hasattr(layer, "merged"))
        assert lora_models.distance(run(pipe), with_lora) < 1e-4
        pipe.unfuse_lora(components=TRANSFORMER)
        assert lora_models.distance(run(pipe), with_lora) < 1e-4
    pipe.unload_lora_weights()
    assert lora_models.distance(run(pipe), run(pipeline(folder))) < 1e-4
    lora_models.load(pipe, "two")
    assert qf.dequantize_lora_layers(pipe) == 0
    pipe.fuse_lora(components=TRANSFORMER, safe_fusing=True)
    assert lora_models.distance(run(pipe), run(pipeline(folder, "two"))) < 1e-4


def test_only_layers_with_an_adapter(folder):
    from peft import LoraConfig

    pipe = pipeline(folder)
    assert qf.dequantize_lora_layers(pipe) == 0
    pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_k"], init_lora_weights=False))
    with_lora, packed = run(pipe), set(map(id, gguf_models.weights_of(pipe.transformer)))
    attention = pipe.transformer.transformer_blocks[0].attn
    changed = {id(layer.get_base_layer().weight) for layer in attention.modules() if hasattr(layer, "merged")}
    changed |= {id(pipe.transformer.single_transformer_blocks[0].attn.to_k.get_base_layer().weight)}
    assert qf.dequantize_lora_layers(pipe.transformer) == len(changed)
    assert set(map(id, gguf_models.weights_of(pipe.transformer))) == packed - changed
    assert type(attention.to_k.base_layer) is torch.nn.Linear
    assert not attention.to_k.base_layer.weight.requires_grad
    assert torch.equal(run(pipe), with_lora)


@pytest.mark.parametrize("verb", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
def test_adapters_of_peft(folder, kind, verb):
    import peft

    name, options = {
        "lora": ("LoraConfig", {}),
        "dora": ("LoraConfig", {"use_dora": True}),
        "lokr": ("LoKrConfig", {"alpha": 8}),
        "loha": ("LoHaConfig", {"alpha": 8}),
    }[kind]
    options = {} if kind == "lora" else options

    def adapted(transformer):
        torch.manual_seed(1)
        config = getattr(peft, name)(r=4, target_modules=["to_q", "to_v"], **options)
        model = peft.get_peft_model(transformer, config)
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in key:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    transformer = gguf_models.transformer(folder)
    without, model = gguf_models.run(transformer), adapted(transformer)
    expected = gguf_models.run(transformer)
    assert not torch.equal(expected, without)
    assert qf.dequantize_lora_layers(model) > 0
    assert torch.equal(gguf_models.run(transformer), expected)
    getattr(model, verb)()
    assert lora_models.distance(gguf_models.run(transformer), expected) < 1e-4


@pytest.mark.parametrize("offload", ["none", "model"])
def test_on_a_device(gpu, folder, offload):
    device = gpu.devices[0]
    pipe = pipeline(folder, "one")
    OFFLOADS[offload](pipe, device)
    with_lora = run(pipe, device=device)
    qf.keep_host_copies(pipe)
    places = {parameter.device for parameter in pipe.transformer.parameters()}
    assert qf.dequantize_lora_layers(pipe) == LAYERS
    assert {parameter.device for parameter in pipe.transformer.parameters()} == places
    for _ in range(2):
        assert torch.equal(run(pipe, device=device), with_lora)
    pipe.fuse_lora(components=TRANSFORMER)
    fused = run(pipe, device=device)
    assert lora_models.distance(fused, with_lora) < 1e-4
    pipe.maybe_free_model_hooks()
    assert torch.equal(run(pipe, device=device), fused)
    qf.audit(pipe).raise_if_misplaced()


@pytest.mark.parametrize("offload", ["sequential", "leaf"])
def test_an_offloaded_model_is_refused(gpu, folder, offload):
    if offload == "leaf" and unmet("diffusers>=0.33"):
        pytest.skip("this diffusers has no group offload")
    device = gpu.devices[0]
    pipe = pipeline(folder, "one")
    OFFLOADS[offload](pipe, device)
    with_lora = run(pipe, device=device)
    with pytest.raises(ValueError, match=r"dequantize_lora_layers\(\) would leave it broken"):
        qf.dequantize_lora_layers(pipe)
    assert torch.equal(run(pipe, device=device), with_lora)
    other = models.flux_pipeline(gguf_models.transformer(folder))
    OFFLOADS[offload](other, device)
    assert qf.dequantize_lora_layers(other) == 0, "nothing to do, so nothing to refuse"


def test_then_offloaded(gpu, folder):
    device = gpu.devices[0]
    pipe = pipeline(folder, "one")
    qf.dequantize_lora_layers(pipe)
    pipe.fuse_lora(components=TRANSFORMER)
    expected = run(pipe.to(device), device=device)
    pipe.to("cpu")
    pipe.enable_sequential_cpu_offload(device=device)
    assert torch.equal(run(pipe, device=device), expected)


def test_a_dispatched_layer_keeps_its_hook(folder):
    """A device_map puts hooks on layers."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    pipe = pipeline(folder, "one")
    with_lora = run(pipe)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    add_hook_to_module(layer.base_layer, hook)
    qf.dequantize_lora_layers(pipe)
    assert layer.base_layer._hf_hook is hook
    assert torch.equal(run(pipe), with_lora)


def test_a_shared_layer_stays_shared(folder):
    pipe = pipeline(folder, "one")
    attention = pipe.transformer.transformer_blocks[0].attn
    attention.to_k.base_layer = attention.to_q.base_layer
    with_lora = run(pipe)
    assert qf.dequantize_lora_layers({"one": pipe.transformer, "two": pipe.transformer}) == LAYERS - 1
    assert attention.to_k.base_layer is attention.to_q.base_layer
    assert torch.equal(run(pipe), with_lora)


def test_a_bias_of_another_dtype(folder):
    """A GGUF layer casts it to its compute dtype."""
    pipe = pipeline(folder, "one", compute_dtype=torch.bfloat16)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    layer.base_layer.bias.data = layer.base_layer.bias.data.float()
    with_lora = run(pipe, torch.bfloat16)
    qf.dequantize_lora_layers(pipe)
    assert torch.equal(run(pipe, torch.bfloat16), with_lora)


def test_no_memory_for_the_next_weight(folder, monkeypatch):
    """What was done until then is no harm, and a second call does the rest."""
    from diffusers.quantizers.gguf import utils

    pipe = pipeline(folder, "one")
    with_lora, left, real = run(pipe), [3], utils.dequantize_gguf_tensor

    def dequantize(weight):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory")
        return real(weight)

    with monkeypatch.context() as patched:
        patched.setattr(utils, "dequantize_gguf_tensor", dequantize)
        with pytest.raises(MemoryError):
            qf.dequantize_lora_layers(pipe)
    assert torch.equal(run(pipe), with_lora)
    assert qf.dequantize_lora_layers(pipe) == LAYERS - 3
    assert torch.equal(run(pipe), with_lora)


@pytest.mark.long
def test_a_compiled_model(folder):
    if unmet("torch>=2.8"):
        pytest.skip("older releases cannot trace GGUF layers")
    torch._dynamo.reset()
    pipe = pipeline(folder, "one")
    pipe.transformer.compile(backend="aot_eager")
    try:
        with_lora = run(pipe)
    except torch._dynamo.exc.InternalTorchDynamoError as reason:
        pytest.skip(f"this torch cannot trace the model: {str(reason)[:80]}")
    qf.dequantize_lora_layers(pipe)
    assert torch.equal(run(pipe), with_lora)
    pipe.fuse_lora(components=TRANSFORMER)
    fused = run(pipe)
    assert 0 < lora_models.distance(fused, with_lora) < 1e-4
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe), fused)
    torch._dynamo.reset()


def test_a_copy_and_a_saved_model(gpu, folder, tmp_path):
    import diffusers

    pipe = pipeline(folder, "one")
    qf.dequantize_lora_layers(pipe)
    pipe.fuse_lora(components=TRANSFORMER)
    pipe.unload_lora_weights()
    fused = run(pipe)
    assert torch.equal(run(models.flux_pipeline(copy.deepcopy(pipe.transformer))), fused)
    dequantize(pipe, gpu.devices[0])
    pipe.transformer.save_pretrained(tmp_path)
    saved = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert torch.equal(run(models.flux_pipeline(saved)), fused)


def test_other_weights_are_left_alone(folder):
    pipe = lora_models.load(models.flux_pipeline(models.flux_transformer()), "one")
    before = dict(pipe.transformer.named_parameters())
    assert qf.dequantize_lora_layers(pipe) == 0
    assert all(parameter is before[name] for name, parameter in pipe.transformer.named_parameters())


def test_arguments(folder):
    with pytest.raises(TypeError, match=r"dequantize_lora_layers\(\) takes a diffusers pipeline"):
        qf.dequantize_lora_layers(3)
    pipe = pipeline(folder, "one")
    qf.release(pipe.transformer)
    with pytest.raises(ReleasedError):
        qf.dequantize_lora_layers(pipe)
