"""diffusers-dequantize-storage: a 4-bit model with a floating quant_storage gets weights of another dtype."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

STORAGES = ("float16", "float32")


def dequantized(folder, storage: str, device):
    from diffusers import FluxTransformer2DModel

    config = models.bnb_config(
        "diffusers",
        4,
        bnb_4bit_quant_storage=getattr(torch, storage),
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = FluxTransformer2DModel.from_pretrained(
        folder, torch_dtype=torch.bfloat16, quantization_config=config
    ).to(device)
    model.dequantize()
    return model


@pytest.mark.defect("diffusers-dequantize-storage", shows="must have the same dtype|weights of")
@pytest.mark.parametrize("storage", STORAGES)
def test_the_dtype_of_the_model(gpu, tmp_path, storage):
    device = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path)
    model = dequantized(folder, storage, device)
    output = models.call_flux(models.flux_pipeline(model), device=device, dtype=torch.bfloat16)
    found = {parameter.dtype for parameter in model.parameters()}
    assert found == {torch.bfloat16}, f"weights of {found}"
    twin = models.flux_pipeline(dequantized(folder, "uint8", device))
    assert torch.equal(output, models.call_flux(twin, device=device, dtype=torch.bfloat16))


@pytest.mark.skipif(
    bool(unmet("diffusers>=0.34")), reason="before diffusers 0.34 no dtype can be asked for in 4 bits"
)
def test_a_dtype_that_is_not_the_storage_is_kept(gpu):
    from bitsandbytes.nn import Linear4bit
    from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight

    layer = Linear4bit(64, 64, quant_storage=torch.float16).bfloat16().to(gpu.devices[0])
    assert dequantize_bnb_weight(layer.weight, dtype=torch.float32).dtype == torch.float32
