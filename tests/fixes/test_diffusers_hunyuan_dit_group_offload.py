"""diffusers-hunyuan-dit-group-offload: HunyuanDiT in every mode of group offloading, plain and quantized."""

from __future__ import annotations

import pytest

from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_allowed, modes
from tests.marks import rest_is_long
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-hunyuan-dit-group-offload"
SHOWS = "does not support group offloading"
POOLER = "expecting query weights shape of|mat2|dtype"  # without the package it does not run quantized at all


@modes()
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_plain_one(gpu, mode):
    from diffusers_quantfix.verify.models import hunyuan_dit

    assert_allowed(gpu, mode, hunyuan_dit.transformer, hunyuan_dit.run)


@pytest.mark.parametrize("bits", rest_is_long([4, 8], 8))
@modes("block", "leaf-stream", long=("leaf", "block-stream"))
@pytest.mark.defect(FIX_ID, shows=f"{SHOWS}|{POOLER}")
def test_a_quantized_one(gpu, tmp_path, mode, bits):
    from diffusers_quantfix.verify.models import hunyuan_dit

    source = hunyuan_dit.transformer()
    models.saved(source, tmp_path)

    def build():
        return models.load_quantized(type(source), tmp_path, bits, dtype=torch.float16)

    assert_allowed(gpu, mode, build, hunyuan_dit.run)


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
    import diffusers

    class Refusing(diffusers.AutoencoderTiny):
        _supports_group_offloading = False

    model = Refusing(encoder_block_out_channels=(8,), decoder_block_out_channels=(8,), num_encoder_blocks=(1,),
                     num_decoder_blocks=(1,))  # fmt: skip
    with pytest.raises(ValueError, match="does not support group offloading"):
        model.enable_group_offload(onload_device=gpu.devices[0], offload_type="leaf_level")
