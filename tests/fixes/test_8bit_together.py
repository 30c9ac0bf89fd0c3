"""The patches of 8-bit models together: what a user does with a pipeline after it was moved."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, eight_bit_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.gate import unmet
from tests.rig import models

pytestmark = pytest.mark.skipif(bool(unmet("bitsandbytes>=0.45")), reason=unmet("bitsandbytes>=0.45"))


def round_trip(gpu, model):
    """Run, go to the CPU and come back: the state in which the companions used to be lost."""
    models.call_flux(models.flux_pipeline(model))
    return model.to("cpu").to(gpu.devices[0])


def test_dequantize_after_a_move(gpu, tmp_path, side):
    import torch

    if unmet("diffusers>=0.33"):
        pytest.skip("before 0.33 dequantize() of diffusers leaves the model on meta")
    expected = eight_bit_models.transformer(tmp_path, side)
    expected.dequantize()
    model = round_trip(gpu, eight_bit_models.transformer(tmp_path, side))
    model.dequantize()
    for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_fuse_lora_after_a_move(gpu, tmp_path, side):
    pytest.importorskip("peft")
    import torch
    from peft import LoraConfig

    def fused(model):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights="gaussian"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.05)
        model.fuse_lora()
        return models.call_flux(models.flux_pipeline(model)).cpu()

    try:
        expected = fused(eight_bit_models.transformer(tmp_path, side))
    except Exception as error:
        pytest.skip(f"fuse_lora fails here without any move as well: {type(error).__name__}: {error}"[:200])
    assert torch.equal(fused(round_trip(gpu, eight_bit_models.transformer(tmp_path, side))), expected)


@pytest.mark.usefixtures("each_spelling")
def test_components_manager_offloads(gpu, tmp_path, side):
    if unmet("diffusers>=0.35"):
        pytest.skip("ComponentsManager came with diffusers 0.35.0")
    from diffusers import ComponentsManager

    here = gpu.devices[0]
    parts = {
        "transformer": eight_bit_models.transformer(tmp_path / "a", side),
        "text_encoder": eight_bit_models.text_encoder(tmp_path / "b"),
    }
    reference = eight_bit_models.encode(parts["text_encoder"], here)
    manager = ComponentsManager()
    for name, part in parts.items():
        manager.add(name, part)
    manager.enable_auto_cpu_offload(device=spelled(here), memory_reserve_margin="100000GB")
    eight_bit.assert_gone(gpu, here)
    for _ in range(2):
        assert (eight_bit_models.encode(parts["text_encoder"], here) == reference).all()
        eight_bit.assert_whole(parts["transformer"], "cpu")
        models.call_flux(models.flux_pipeline(parts["transformer"]), device=here)
        eight_bit.assert_whole(parts["text_encoder"], "cpu")
    manager.disable_auto_cpu_offload()


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("ran", [False, True], ids=["before forward", "after forward"])
def test_sequential_offload_of_a_pipeline(gpu, tmp_path, side, ran):
    import torch

    here = gpu.devices[0]
    model = eight_bit_models.transformer(tmp_path, side)
    pipe = models.flux_pipeline(model)
    reference = models.call_flux(pipe).cpu()
    if not ran:
        pipe = models.flux_pipeline(eight_bit_models.transformer(tmp_path, side))
        model = pipe.transformer
    pipe.enable_sequential_cpu_offload(device=spelled(here))

    def check(latents):
        assert torch.equal(latents, reference)
        constants = [getattr(pipe.scheduler, name) for name in ("sigmas", "timesteps")]
        eight_bit.assert_gone(gpu, here, sum(tensor.nbytes for tensor in constants))

    for _ in range(2):
        check(models.call_flux(pipe, device=here).cpu())
    assert_goes_on(lambda: models.call_flux(pipe, device=here).cpu(), check)
    pipe.remove_all_hooks()
    eight_bit.assert_whole(model, model.device)
    model.to(here)
    assert torch.equal(models.call_flux(pipe, device=here).cpu(), reference)
