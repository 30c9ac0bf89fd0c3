"""diffusers-bria-fibo2-timestep-dtype: the transformer of Bria Fibo 2 in 8 bits."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "diffusers-bria-fibo2-timestep-dtype"
SHOWS = "Expected query, key, and value to have the same dtype"

torch = pytest.importorskip("torch")
fibo2 = pytest.importorskip(
    "diffusers.models.transformers.transformer_bria_fibo2", reason="this diffusers has no Bria Fibo 2"
)


def transformer():
    torch.manual_seed(0)
    return fibo2.BriaFibo2Transformer2DModel(
        in_channels=16,
        dim=64,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=64,
        injection_layer_ids=(0,),
        perceiver_num_layers=1,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=4,
        axes_dims=(8, 12, 12),
        axes_lens=(16, 16, 16),
    ).eval()


def run(model, device, step: float = 0.5):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 16, 8, 8, generator=generator).bfloat16()
    text = torch.randn(1, 2, 5, 64, generator=generator).bfloat16()
    with torch.no_grad():
        return model(
            noise.to(device), torch.tensor([step], device=device), text.to(device), return_dict=False
        )[0].cpu()


def distance(one, other):
    return ((one - other).float().norm() / other.float().norm()).item()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_in_8_bits(gpu, tmp_path):
    plain, device = transformer().bfloat16(), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=8, dtype=torch.bfloat16)
    out = run(model, device)
    assert out.dtype == torch.bfloat16
    assert distance(out, run(plain, "cpu")) < 0.1
    assert torch.equal(run(model, device), out)
    assert not torch.equal(run(model, device, step=1.0), out), "the output does not depend on the step"


def test_in_4_bits_upstream_casts(gpu, tmp_path):
    """To the layer's ``compute_dtype``, whatever its bias is."""
    plain, device = transformer().bfloat16(), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=4, dtype=torch.bfloat16).to(device)
    for index in (0, 2):
        model.t_embedder.mlp[index].compute_dtype = torch.float16
    seen = []
    model.t_embedder.mlp[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.no_grad():
        model.t_embedder(torch.ones(1, device=device))
    assert seen == [torch.float16]
