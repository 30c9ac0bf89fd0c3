"""diffusers-controlnet-from-quantized: a ControlNet that is made of a quantized transformer has wrong weights."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models
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
    for layer in linears(model):
        packed = (layer.weight / layer.weight.abs().amax(1, keepdim=True) * 127).round().to(torch.int8)
        layer.weight = bnb.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False)
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


BACKENDS = {"int8": int8, "nf4": nf4, "quanto": quanto, "torchao": torchao, "gguf": gguf}


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
@pytest.mark.parametrize("backend", ["int8", "quanto"])
def test_what_was_silent(backend):
    """The bytes of an 8-bit weight were taken for numbers; weights of quanto were left out."""
    with pytest.raises(ValueError, match="quantized"):
        convert(BACKENDS[backend](models.flux_transformer()))


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
                assert "controlnet_from_quantized" in method.__func__.__code__.co_filename, cls.__name__


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
