"""diffusers-latte-position-dtype: a quantized Latte computes in float32, and its pipeline fails in the second step."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("bitsandbytes")

FIX_ID = "diffusers-latte-position-dtype"
SHOWS = "torch.float32 == torch.bfloat16"


def _transformer():
    from diffusers import LatteTransformer3DModel

    torch.manual_seed(0)
    return LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        caption_channels=32,
        video_length=2,
        attention_bias=True,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
    )


def _run(model, device):
    generator = torch.Generator().manual_seed(0)
    inputs, text = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((1, 4, 2, 8, 8), (1, 4, 32))
    )
    with torch.no_grad():
        return model(inputs, torch.tensor([7], device=device), text).sample


def _loaded(folder, device):
    """The model, and its output with that buffer cast by hand."""
    plain = _transformer()
    models.saved(plain, folder)
    model, cast = (four_bit.load(type(plain), folder, dtype=torch.bfloat16).to(device) for _ in range(2))
    cast.temp_pos_embed = cast.temp_pos_embed.to(torch.bfloat16)
    return model, _run(cast, device).cpu()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_quantized_model_stays_in_its_dtype(gpu, tmp_path):
    model, reference = _loaded(tmp_path, gpu.devices[0])
    output = _run(model, gpu.devices[0])
    assert output.dtype == torch.bfloat16
    assert torch.equal(output.cpu(), reference)
    assert model.temp_pos_embed.dtype == torch.float32  # the buffer is not touched


def test_under_sequential_offload(gpu, tmp_path):
    from accelerate import cpu_offload

    model, reference = _loaded(tmp_path, gpu.devices[0])
    cpu_offload(model.to("cpu"), gpu.devices[0])
    output = _run(model, gpu.devices[0])
    assert output.dtype == torch.bfloat16
    assert torch.equal(output.cpu(), reference)


def test_a_plain_model_runs_as_ever(gpu):
    device = gpu.devices[0]
    model = _transformer().to(device)
    inputs, text = torch.zeros(1, 4, 2, 8, 8, device=device), torch.zeros(1, 4, 32, device=device)
    with torch.no_grad():
        assert model(inputs, torch.tensor([7], device=device), text).sample.dtype == torch.float32
