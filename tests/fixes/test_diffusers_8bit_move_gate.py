"""diffusers-8bit-move-gate: pipelines do not move or offload their 8-bit components."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, eight_bit_models
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-8bit-move-gate"
REFUSAL = "8bit and moving it to"
STAYS = r"is on cuda:0, not on|bytes stayed on cuda|it warned"
# The last one is diffusers-8bit-offload-detection.
TORN = "|same device|same GPU|companion is on|you have activated sequential model offloading"
FLOAT16_ON_CPU = "cannot run with `cpu` device"


def pipeline(tmp_path, side, **places):
    """A FluxPipeline whose transformer and second text encoder are in 8 bits."""
    transformer = eight_bit_models.transformer(tmp_path / "transformer", side)
    try:
        encoder = eight_bit_models.text_encoder(tmp_path / "encoder")
    except pytest.skip.Exception:  # transformers wants a newer bitsandbytes: the transformer is enough
        encoder = models.t5_encoder()
    return models.flux_pipeline(transformer, text=True, text_encoder_2=encoder)


def assert_warned_rightly(said: str, float16: bool) -> None:
    assert REFUSAL not in said, f"it warned: {said}"
    assert "have been loaded in `bitsandbytes` 8bit" not in said
    assert (FLOAT16_ON_CPU in said) is float16, f"float16 on the CPU was {'not ' if float16 else ''}mentioned"


@pytest.mark.parametrize("first", [False, True], ids=["before forward", "after forward"])
@pytest.mark.defect(FIX_ID, shows=STAYS)
@pytest.mark.defect("bnb-linear8bit-move", shows=STAYS)
def test_pipe_to_cpu_moves_everything_and_says_nothing_false(gpu, tmp_path, side, first):
    import torch

    here = gpu.devices[0]
    pipe = fp16_rest(pipeline(tmp_path, side), here)
    if first:
        reference = models.prompt_flux(pipe).cpu()
    size = gpu.allocated(here)
    said = eight_bit_models.warnings_of(lambda: pipe.to("cpu"))
    assert_warned_rightly(said, float16=True)
    for part in (pipe.transformer, pipe.text_encoder_2):
        eight_bit.assert_whole(part, "cpu")
    eight_bit.assert_gone(gpu, here, constants(pipe, here))
    if unmet("accelerate>=1.1"):
        return  # upstream refuses pipe.to("cuda") with bitsandbytes there
    pipe.to(here)
    assert gpu.allocated(here) <= size
    if first:
        assert torch.equal(models.prompt_flux(pipe).cpu(), reference)


@pytest.mark.defect(FIX_ID, shows=STAYS + TORN)
@pytest.mark.defect("bnb-linear8bit-move", shows=STAYS + TORN)
def test_pipe_to_the_other_device(gpu, tmp_path, side):
    import torch

    if len(gpu.devices) < 2 or unmet("accelerate>=1.1"):
        pytest.skip("needs two CUDA devices, and an accelerate with which upstream allows the move")
    here, there = gpu.devices[:2]
    pipe = fp16_rest(pipeline(tmp_path, side), here)
    reference = models.prompt_flux(pipe).cpu()
    pipe.to(there)
    for part in (pipe.transformer, pipe.text_encoder_2):
        eight_bit.assert_whole(part, there)
    eight_bit.assert_gone(gpu, here, constants(pipe, here))
    assert torch.equal(models.prompt_flux(pipe).cpu(), reference)


@pytest.mark.defect(FIX_ID, shows=r"bytes stayed on cuda|resting")
@pytest.mark.defect("bnb-linear8bit-move", shows=r"bytes stayed on cuda|resting|same device")
def test_model_offload_frees_the_components_between_their_uses(gpu, tmp_path, side):
    import torch

    here = gpu.devices[0]
    reference = models.prompt_flux(fp16_rest(pipeline(tmp_path, side), here)).cpu()
    pipe = fp16_rest(pipeline(tmp_path, side), here)
    pipe.enable_model_cpu_offload()
    eight_bit.assert_gone(gpu, here, constants(pipe, here))
    seen = []
    parts = {"text_encoder_2": pipe.text_encoder_2, "transformer": pipe.transformer}
    for name, part in parts.items():
        part.register_forward_hook(
            lambda module, *_, name=name: seen.append(
                (name, [other for other, it in parts.items() if it is not module and eight_bit_on(it, here)])
            )
        )
    for _ in range(2):
        latents = models.prompt_flux(pipe).cpu()
        assert constants(pipe, here) <= 12
        assert torch.equal(latents, reference)
        eight_bit.assert_gone(gpu, here, constants(pipe, here))
    assert {name for name, _ in seen} == set(parts)
    assert all(not others for _, others in seen), f"resting components on the device: {seen}"


def test_a_model_that_is_spread_is_left_to_upstream(gpu, tmp_path, side):
    if len(gpu.devices) < 2 or unmet("bitsandbytes>=0.45"):
        pytest.skip("needs two CUDA devices")
    halves = {"shared": 0, "encoder.embed_tokens": 0, "encoder.block.0": 0, "encoder.block.1": 1,
              "encoder.final_layer_norm": 1, "encoder.dropout": 1}  # fmt: skip
    if unmet("diffusers<0.37"):
        pytest.skip("0.37 and later move it, by themselves")
    encoder = eight_bit_models.text_encoder(tmp_path, halves)
    pipe = models.flux_pipeline(models.flux_transformer(), text_encoder_2=encoder)
    said = eight_bit_models.warnings_of(lambda: pipe.to("cpu"))
    assert REFUSAL in said
    assert {parameter.device.type for parameter in encoder.parameters()} == {"cuda"}


def constants(pipe, device) -> int:
    """Bytes of the scheduler's sigmas and timesteps, which diffusers makes on the device and leaves there."""
    kept = [getattr(pipe.scheduler, name) for name in ("sigmas", "timesteps")]
    return sum(tensor.nbytes for tensor in kept if tensor.device == device)


def fp16_rest(pipe, device):
    import torch

    for part in (pipe.text_encoder, pipe.vae, pipe.text_encoder_2):
        if not eight_bit.layers_of(part):
            part.to(device, torch.float16)
    return pipe


def eight_bit_on(model, device) -> bool:
    return any(parameter.device == device for parameter in model.parameters())
