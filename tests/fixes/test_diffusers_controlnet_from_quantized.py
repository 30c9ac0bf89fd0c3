"""diffusers-controlnet-from-quantized: a ControlNet that is made of a quantized transformer has wrong weights."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from diffusers_quantfix.models import copied_weights
from diffusers_quantfix.verify.models import controlnets as tiny
from tests.fixes import four_bit, quanto_models
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

FIX_ID = "diffusers-controlnet-from-quantized"
# As those do who keep the embedders in full precision: their names would not fit, which is an error.
EMBEDDERS = ("time_text_embed", "context_embedder", "x_embedder", "proj_out")
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.32")), reason="the ControlNets are a package from diffusers 0.32 on"
)


def int8(model):
    """As bitsandbytes has the layers after it has quantized them."""
    bnb = pytest.importorskip("bitsandbytes")

    def made(layer):
        new = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False
        )
        greatest = layer.weight.detach().abs().amax(1)
        packed = (layer.weight.detach() / greatest[:, None] * 127).round().to(torch.int8)
        new.weight = bnb.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False)
        new.weight.CB, new.weight.SCB = packed, greatest
        new.bias = layer.bias
        return new

    return exchanged(model, made)


def bfl(model):
    """FP8 of Black Forest Labs, with a scale for each row."""
    utils = pytest.importorskip("diffusers.quantizers.bfl.utils", reason="diffusers is too old for BFL's FP8")

    def made(layer):
        new = utils.BFLFP8RLinear(
            layer.in_features, layer.out_features, layer.bias is not None, torch.float32
        )
        new.weight.data, new.weight_scale = utils.quantize_fp8r(layer.weight.detach())
        new.bias = layer.bias
        return new

    return exchanged(model, made)


def sdnq(model):
    pytest.importorskip("sdnq", reason="SDNQ is not installed")
    from sdnq import quantizer

    return quantizer.sdnq_post_load_quant(
        model, weights_dtype="int8", modules_to_not_convert=list(EMBEDDERS), torch_dtype=torch.float32
    )


def exchanged(model, made):
    """``model`` with another layer in place of each linear one."""
    layers = set(linears(model))
    for name, layer in list(model.named_modules()):
        if layer in layers:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made(layer))
    return model


def nf4(model):
    bnb = pytest.importorskip("bitsandbytes")
    for layer in linears(model):
        packed = torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8)
        layer.weight = bnb.nn.Params4bit(packed, requires_grad=False, bnb_quantized=True)
    return model


def quanto(model):
    library = quanto_models.quanto()
    library.quantize(model, weights=library.qint8, exclude=[f"{name}*" for name in EMBEDDERS])
    library.freeze(model)
    return model


def torchao(model):
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    layers = set(linears(model))
    ao.quantize_(model, ao.Int8WeightOnlyConfig(version=2), filter_fn=lambda layer, name: layer in layers)
    return model


def gguf(model):
    utils = pytest.importorskip("diffusers.quantizers.gguf.utils", reason="needs gguf")
    gguf_library = pytest.importorskip("gguf")
    for layer in linears(model):
        packed = torch.zeros(layer.out_features, layer.in_features // 32 * 34, dtype=torch.uint8)
        layer.weight = utils.GGUFParameter(packed, quant_type=gguf_library.GGMLQuantizationType.Q8_0)
    return model


BACKENDS = {
    "int8": int8, "nf4": nf4, "quanto": quanto, "torchao": torchao, "gguf": gguf, "bfl": bfl, "sdnq": sdnq,
}  # fmt: skip


def linears(model) -> list:
    return [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.startswith(EMBEDDERS)
    ]


def convert(transformer, **options):
    from diffusers import FluxControlNetModel

    config = transformer.config
    return FluxControlNetModel.from_transformer(
        transformer,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
        **options,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantized_transformer_is_refused(backend):
    transformer = BACKENDS[backend](models.flux_transformer())
    before = [id(parameter) for parameter in transformer.parameters()]
    said = r"FluxControlNetModel\.from_transformer .* `dequantize\(\)`, or pass `load_weights_from_transformer=False`"
    with pytest.raises(ValueError, match=said):
        convert(transformer)
    with pytest.raises(ValueError, match=said):
        convert(transformer=transformer, load_weights_from_transformer=True)
    assert [id(parameter) for parameter in transformer.parameters()] == before


@pytest.mark.defect(FIX_ID, shows="DID NOT RAISE")
@pytest.mark.parametrize("backend", ["int8", "quanto", "bfl", "sdnq"])
def test_what_was_silent(backend):
    """The numbers of an 8-bit weight were taken without their scales; weights of quanto were left out."""
    with pytest.raises(ValueError, match="quantized"):
        convert(BACKENDS[backend](models.flux_transformer()))


@pytest.mark.defect(FIX_ID, shows="DID NOT RAISE")
def test_as_bitsandbytes_loads_it(gpu, tmp_path):
    from diffusers import FluxTransformer2DModel

    folder = models.saved(models.flux_transformer(), tmp_path)
    with four_bit.skip_for_other_reasons():
        transformer = models.load_quantized(
            FluxTransformer2DModel, folder, bits=8, llm_int8_skip_modules=list(EMBEDDERS)
        )
    with pytest.raises(ValueError, match=r"quantized \(bitsandbytes\)"):
        convert(transformer)


def test_without_its_weights_it_is_no_matter():
    convert(int8(models.flux_transformer()), load_weights_from_transformer=False)


def test_a_plain_transformer_is_taken():
    transformer = models.flux_transformer()
    made = convert(transformer)
    for name, tensor in made.transformer_blocks[0].state_dict().items():
        assert torch.equal(tensor, transformer.transformer_blocks[0].state_dict()[name])


@pytest.mark.parametrize("backend", ["int8", "quanto"])
def test_a_unet(backend):
    from diffusers import ControlNetModel

    with pytest.raises(ValueError, match=r"ControlNetModel\.from_unet .* `load_weights_from_unet=False`"):
        ControlNetModel.from_unet(BACKENDS[backend](models.unet()))
    made = ControlNetModel.from_unet(models.unet())
    assert torch.equal(made.conv_in.weight, models.unet().conv_in.weight)


def test_after_dequantizing():
    """With the library's own function: the flags of the model are another matter."""
    transformer = quanto(models.flux_transformer())
    for layer in transformer.modules():
        if type(layer).__name__ == "QLinear":
            layer.weight = torch.nn.Parameter(layer.weight.dequantize())
    made = convert(transformer)
    source = transformer.transformer_blocks[0].attn.to_q.weight
    assert torch.equal(made.transformer_blocks[0].attn.to_q.weight, source)


def test_every_class_that_copies_weights_is_guarded():
    from diffusers.models import controlnets

    from diffusers_quantfix.engine.probe import names_used

    for cls in vars(controlnets).values():
        for name in ("from_transformer", "from_unet"):
            method = vars(cls).get(name) if isinstance(cls, type) else None
            if method is not None and "load_state_dict" in names_used(method):
                assert "copied_weights" in method.__func__.__code__.co_filename, cls.__name__


def test_what_is_not_copied_may_be_quantized():
    """Upstream's own result: nothing reads the last layer."""
    bnb = pytest.importorskip("bitsandbytes")
    transformer = models.flux_transformer()
    expected = convert(transformer).state_dict()
    packed = (transformer.proj_out.weight * 10).round().to(torch.int8)
    transformer.proj_out.weight = bnb.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False)
    made = convert(transformer).state_dict()
    copied = [
        name
        for name in made
        if name.partition(".")[0] in ("transformer_blocks", "x_embedder", "time_text_embed")
    ]
    assert copied
    for name in copied:
        assert torch.equal(made[name], expected[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_motion_unet_is_made_without_a_word(backend):
    """Upstream copies strictly here, and PyTorch raises: no fix is needed."""
    from diffusers import UNetMotionModel

    whole = UNetMotionModel.from_unet2d(models.unet()).down_blocks[1].attentions[0].state_dict()
    source = models.unet().down_blocks[1].attentions[0].state_dict()
    assert all(torch.equal(whole[name], tensor) for name, tensor in source.items())
    with pytest.raises(RuntimeError, match="in loading state_dict for"):
        UNetMotionModel.from_unet2d(BACKENDS[backend](models.unet()))


def test_nor_by_a_pipeline():
    from diffusers import AnimateDiffPipeline

    with pytest.raises(RuntimeError, match="in loading state_dict for"):
        AnimateDiffPipeline(
            models.vae(), None, None, int8(models.unet()), motion_adapter=None, scheduler=None
        )


def test_who_passes_over_names_is_guarded():
    """Every place of the installed diffusers that copies from one model to another with ``strict=False``."""
    import diffusers
    from diffusers.models import controlnets

    root = Path(diffusers.__file__).parent
    guarded = {(cls.__module__, name) for cls, name in copied_weights.conversions(controlnets)}
    found = set()
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "strict=False" not in text:
            continue
        module = ".".join((root.name, *file.relative_to(root).with_suffix("").parts))
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef) and any(map(copies_loosely, ast.walk(function))):
                found.add((module, function.name))
    assert found
    assert found <= guarded


def copies_loosely(node) -> bool:
    """``load_state_dict(one.state_dict(), strict=False)``"""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and any(word.arg == "strict" and ast.unparse(word.value) == "False" for word in node.keywords)
        and ".state_dict()" in ast.unparse(node.args[0])
    )


def with_a_lora(model, targets, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.inject_adapter_in_model(config, model)


@pytest.mark.defect(FIX_ID, shows="assert False")
@pytest.mark.parametrize("kind", ["flux", "hunyuan", "sparse"])
def test_layers_with_a_lora_are_copied(kind):
    """Their names differ, so that upstream leaves random numbers where they should be."""
    source = tiny.source(kind)
    weight = tiny.layer_of(kind, source).weight.detach().clone()
    with_a_lora(source, ["to_q"])
    copied = tiny.layer_of(kind, tiny.made(kind, source)).weight
    same = torch.equal(copied, weight)
    assert same


def every_layer(made):
    return {name: tensor for name, tensor in made.state_dict().items() if "transformer_blocks" in name}


@pytest.mark.parametrize("dora", [False, True])
def test_all_that_is_copied_is_what_a_transformer_without_the_lora_gives(dora):
    expected = every_layer(convert(models.flux_transformer()))
    source = with_a_lora(
        models.flux_transformer(),
        ["to_q", "to_k", "to_out.0", "linear", "net.0.proj", "net.2"],
        use_dora=dora,
    )
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    made = every_layer(convert(source))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())


def test_a_fused_lora_is_copied():
    source = with_a_lora(models.flux_transformer(), ["to_q"])
    layer = source.transformer_blocks[0].attn.to_q
    plain = layer.get_base_layer().weight.detach().clone()
    layer.merge()
    copied = convert(source).transformer_blocks[0].attn.to_q.weight
    assert torch.equal(copied, layer.get_base_layer().weight) and not torch.equal(copied, plain)


def test_a_module_that_is_saved_with_the_adapter_is_copied_as_it_was():
    source = models.flux_transformer()
    weight = source.transformer_blocks[0].attn.to_k.weight.detach().clone()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["to_q"], modules_to_save=["to_k"])
    peft.get_peft_model(source, config)
    assert torch.equal(convert(source).transformer_blocks[0].attn.to_k.weight, weight)


@pytest.mark.parametrize("backend", ["int8", "quanto", "bfl"])
def test_a_quantized_layer_below_a_lora_is_refused(backend):
    source = BACKENDS[backend](models.flux_transformer())
    try:
        with_a_lora(source, ["to_q"])
    except (TypeError, ValueError) as error:
        pytest.skip(f"no LoRA here: {error}")
    with pytest.raises(ValueError, match="quantized"):
        convert(source)


def test_where_upstream_copies_strictly_it_says_that_a_lora_is_in_the_way():
    from diffusers import ControlNetModel

    with pytest.raises(RuntimeError, match="in loading state_dict for"):
        ControlNetModel.from_unet(with_a_lora(models.unet(), ["to_q"]))
