"""diffusers-gguf-dequantize: a dequantized GGUF model has float16 weights."""

from __future__ import annotations

import pytest

from tests.fixes import gguf_models
from tests.rig import models

FIX_ID = "diffusers-gguf-dequantize"
SHOWS = r"must have the same dtype, but got (BFloat16|Float) and Half"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_runs_as_before(gpu, folder, dtype, where):
    """On the CPU too, from where diffusers moves it to the device and back."""
    import torch

    dtype, device = getattr(torch, dtype), gpu.devices[0]
    model = gguf_models.transformer(folder, compute_dtype=dtype).to(device)

    def run():
        return models.call_flux(models.flux_pipeline(model.to(device)), device=device, dtype=dtype).cpu()

    reference = run()
    model = model.to(device if where == "gpu" else "cpu").dequantize() or model
    assert not gguf_models.weights_of(model)
    assert torch.equal(run(), reference)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
