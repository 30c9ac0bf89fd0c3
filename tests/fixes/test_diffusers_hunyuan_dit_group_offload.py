"""diffusers-hunyuan-dit-group-offload: HunyuanDiT in every mode of group offloading, plain and quantized."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import modes
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-hunyuan-dit-group-offload"
SHOWS = "does not support group offloading"
POOLER = "expecting query weights shape of|mat2|dtype"  # without the package it does not run quantized at all


def check(gpu, mode, build):
    """The output of the model on the device, in two runs and after interrupted ones, and nothing stays there."""
    from diffusers_quantfix.verify.models import hunyuan_dit

    device = gpu.devices[0]
    model = build()
    expected = hunyuan_dit.run(model.to(device) if model.device != device else model, device)
    del model
    before = gpu.allocated(device)
    model = build()
    if model.device.type != "cpu":
        model.to("cpu")
    model.enable_group_offload(onload_device=spelled(device), **mode)

    def same(output):
        assert torch.equal(output, expected)

    for _ in range(2):
        same(hunyuan_dit.run(model, device))
    assert_goes_on(lambda: hunyuan_dit.run(model, device), same)
    same(hunyuan_dit.run(model, device))
    assert gpu.allocated(device) <= before, "bytes stayed on the device"


@modes()
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_plain_one(gpu, mode):
    from diffusers_quantfix.verify.models import hunyuan_dit

    check(gpu, mode, hunyuan_dit.transformer)


@pytest.mark.parametrize("bits", [4, 8])
@modes("leaf", "block", "leaf-stream", "block-stream")
@pytest.mark.defect(FIX_ID, shows=f"{SHOWS}|{POOLER}")
def test_a_quantized_one(gpu, tmp_path, mode, bits):
    from diffusers_quantfix.verify.models import hunyuan_dit

    source = hunyuan_dit.transformer()
    models.saved(source, tmp_path)
    check(gpu, mode, lambda: models.load_quantized(type(source), tmp_path, bits, dtype=torch.float16))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_trains(gpu):
    from diffusers_quantfix.verify.models import hunyuan_dit

    device = gpu.devices[0]
    grads = []
    for offloaded in (False, True):
        model = hunyuan_dit.transformer().requires_grad_(False)
        model.time_extra_emb.pooler.positional_embedding.requires_grad_(True)
        if offloaded:
            model.enable_group_offload(onload_device=device, offload_type="leaf_level")
        else:
            model.to(device)
        with torch.enable_grad():
            inputs = torch.ones(1, 4, 32, device=device, requires_grad=True)
            model.time_extra_emb.pooler.train()
            model.time_extra_emb(
                torch.tensor([3.0], device=device), inputs, torch.zeros(1, 6, device=device),
                torch.zeros(1, dtype=torch.long, device=device), hidden_dtype=torch.float32,
            ).sum().backward()  # fmt: skip
        grads.append(inputs.grad.cpu())
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


def test_other_models_that_refuse_it_still_do(gpu):
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        norm_num_groups=4,
    )
    with pytest.raises(ValueError, match="does not support group offloading"):
        model.enable_group_offload(onload_device=gpu.devices[0], offload_type="leaf_level")
