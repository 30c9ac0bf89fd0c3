"""diffusers 0.31: a ControlNet that is made of a quantized model has wrong weights, one fix for each module.

``diffusers-controlnet-flux-from-quantized``, ``-hunyuan-`` and ``-sparse-``; from 0.32 on their modules are a package:
see test_diffusers_controlnet_from_quantized.py, which has the same tests for what copies of a layer with a LoRA.
"""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import controlnets
from tests.fixes import quanto_models
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.skipif(
    not unmet("diffusers>=0.32"), reason="from diffusers 0.32 on the ControlNets are a package"
)
KINDS = [
    pytest.param("flux", marks=pytest.mark.defect("diffusers-controlnet-flux-from-quantized", shows="DID NOT RAISE")),
    pytest.param(
        "hunyuan", marks=pytest.mark.defect("diffusers-controlnet-hunyuan-from-quantized", shows="DID NOT RAISE")
    ),
    pytest.param(
        "sparse", marks=pytest.mark.defect("diffusers-controlnet-sparse-from-quantized", shows="DID NOT RAISE")
    ),
]  # fmt: skip


def int8(layer):
    bnb = pytest.importorskip("bitsandbytes")
    packed = (layer.weight.detach() / layer.weight.abs().amax() * 127).round().to(torch.int8)
    layer.weight = bnb.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False)


def quanto(layer):
    library = quanto_models.quanto()
    weight = library.quantize_weight(
        layer.weight, library.qint8, axis=0, scale=layer.weight.detach().abs().amax(1, True) / 127
    )
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_silent(kind):
    """The numbers of an 8-bit weight were taken without their scales."""
    source = controlnets.source(kind)
    int8(controlnets.layer_of(kind, source))
    before = [id(parameter) for parameter in source.parameters()]
    with pytest.raises(
        ValueError, match=r"quantized \(bitsandbytes\) cannot be copied: .* or pass `load_weights"
    ):
        controlnets.made(kind, source)
    assert [id(parameter) for parameter in source.parameters()] == before


@pytest.mark.parametrize("kind", ["flux", "hunyuan", "sparse"])
def test_other_backends_are_refused(kind):
    source = controlnets.source(kind)
    quanto(controlnets.layer_of(kind, source))
    with pytest.raises(ValueError, match=r"quantized \(optimum\)"):
        controlnets.made(kind, source)


@pytest.mark.parametrize("kind", ["flux", "hunyuan", "sparse"])
def test_a_plain_model_is_taken(kind):
    source = controlnets.source(kind)
    made = controlnets.made(kind, source)
    assert torch.equal(
        controlnets.layer_of(kind, made).weight, controlnets.layer_of(kind, controlnets.source(kind)).weight
    )


def test_one_whose_weights_are_not_copied_is_taken():
    from diffusers import FluxControlNetModel

    source = controlnets.source("flux")
    int8(controlnets.layer_of("flux", source))
    config = source.config
    FluxControlNetModel.from_transformer(
        source, 1, 1, config.attention_head_dim, config.num_attention_heads, False
    )


@pytest.mark.parametrize("kind", ["flux", "hunyuan", "sparse"])
def test_layers_with_a_lora_are_copied(kind):
    peft = pytest.importorskip("peft")
    source = controlnets.source(kind)
    weight = controlnets.layer_of(kind, source).weight.detach().clone()
    config = peft.LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, source)
    assert torch.equal(controlnets.layer_of(kind, controlnets.made(kind, source)).weight, weight)
