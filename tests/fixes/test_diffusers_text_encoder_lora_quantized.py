"""diffusers-text-encoder-lora-quantized: a LoRA for a quantized text encoder cannot be loaded."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-text-encoder-lora-quantized"
# The last is what peft before 0.15 says first.
SHOWS = (
    r"cannot cast a bitsandbytes model|`\.to` is not supported for `4-bit` or `8-bit`|Cannot copy out of meta"
)

TEXT_ONLY = {
    "text": True,
    "transformer": False,
}  # one for the transformer may end in diffusers-lora-offload-flip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.clip_text(), tmp_path_factory.mktemp("clip"))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_lora_is_loaded(gpu, saved, bits):
    """The numbers are those of the LoRA; its layers are on the device of the encoder, and of its dtype."""
    import torch

    pipe = pipeline(saved, bits)
    where = pipe.text_encoder.device
    quantized = encode(pipe, where)
    lora_models.load(pipe, "one", **TEXT_ONLY)
    layers = adapter_parameters(pipe.text_encoder)
    assert layers
    assert {parameter.dtype for parameter in layers} == {torch.float16}
    assert {parameter.device for parameter in pipe.text_encoder.parameters()} == {where}
    plain, adapted = encoder(), encoder(lora=True)
    # Quantization moves the numbers a little; the LoRA moves them much more, and in the same direction.
    change = encode(pipe, where) - quantized
    wanted = adapted - plain
    cosine = torch.nn.functional.cosine_similarity(change.flatten(), wanted.flatten(), dim=0)
    assert cosine > 0.9, (
        f"the LoRA changes the encoder by {change.norm()}, the wanted change is {wanted.norm()}"
    )


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("bits", [4, 8])
def test_offloaded_encoder_keeps_its_hooks(gpu, saved, bits):
    """Sequential offload: exactly what the encoder gives that was never offloaded, with two LoRAs and after them."""
    from accelerate import cpu_offload

    runs, here = [], gpu.devices[0]

    def check(states):
        assert lora_models.distance(states, runs[0]) == 0

    for offloaded in (False, True):
        pipe = pipeline(saved, bits)
        if offloaded:
            cpu_offload(pipe.text_encoder, spelled(here))
        before = lora_models.hooks_of(pipe)
        lora_models.load(pipe, **TEXT_ONLY)
        after = lora_models.hooks_of(pipe)
        assert {id(hook) for hook, _ in before.values()} <= {id(hook) for hook, _ in after.values()}
        runs.append(encode(pipe, here))
        if offloaded:
            assert_goes_on(lambda pipe=pipe: encode(pipe, here), check)
        pipe.delete_adapters("two")
        runs.append(encode(pipe, here))
        pipe.unload_lora_weights()
        runs.append(encode(pipe, here))
    assert [lora_models.distance(*pair) for pair in zip(runs[:3], runs[3:], strict=True)] == [0] * 3


def test_a_real_cast_is_still_refused(gpu, saved):
    import torch

    pipe = pipeline(saved, 4)
    lora_models.load(pipe, "one", **TEXT_ONLY)
    with pytest.raises(ValueError):
        pipe.text_encoder.to(torch.float32)
    with pytest.raises(ValueError):
        pipe.text_encoder.to(device=pipe.text_encoder.device, dtype=torch.float32)
    assert "to" not in vars(pipe.text_encoder) or vars(pipe.text_encoder)["to"].__module__ != MODULE


MODULE = "diffusers_quantfix.adapters.new_layers"


def pipeline(folder, bits: int):
    """A pipeline with a quantized CLIP."""
    from transformers import CLIPTextModel

    model = four_bit.load(CLIPTextModel, folder, bits=bits, device_map={"": 0})
    return models.flux_pipeline(text_encoder=model)


def encoder(lora: bool = False):
    """What the encoder gives that is not quantized, with or without the LoRA."""
    pipe = models.flux_pipeline(text_encoder=models.clip_text())
    if lora:
        lora_models.load(pipe, "one", **TEXT_ONLY)
    return encode(pipe, "cpu")


def encode(pipe, where):
    import torch

    with torch.no_grad():
        tokens = torch.tensor([[2, 5, 6, 3]], device=where)
        return pipe.text_encoder(tokens).last_hidden_state.float().cpu()


def adapter_parameters(model) -> list:
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
