"""diffusers-custom-diffusion-dtype: the processors of Custom Diffusion on a quantized UNet."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "diffusers-custom-diffusion-dtype"
SHOWS = r"same dtype|output differs by|Byte|Char"

torch = pytest.importorskip("torch")
CLASSES = ["CustomDiffusionAttnProcessor", "CustomDiffusionAttnProcessor2_0"]


def made(processor: str, name: str, device, dtype):
    """A processor for the attention ``name``, as the training script of diffusers makes them."""
    from diffusers.models import attention_processor

    torch.manual_seed(1)
    across = not name.endswith("attn1.processor")
    kind = getattr(attention_processor, processor)
    made = kind(across, False, hidden_size=128, cross_attention_dim=64 if across else None)
    return made.to(device, dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("processor", CLASSES)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_unet_from_a_checkpoint(gpu, tmp_path, bits, processor):
    plain, device = models.unet(), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits)
    if bits == 4:
        model.to(device)

    def run(unet, device, dtype):
        unet.set_attn_processor({name: made(processor, name, device, dtype) for name in unet.attn_processors})
        generator = torch.Generator().manual_seed(0)
        noise, text = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, 64, generator=generator)
        with torch.no_grad():
            return unet(noise.to(device, dtype), 3, text.to(device, dtype)).sample.float().cpu()

    expected, out = run(plain, "cpu", torch.float32), run(model, device, torch.float16)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < {4: 0.3, 8: 0.05}[bits], f"the output differs by {error:.0%}"
