"""bnb-gemv-shape: a single row, which has no batch or many dimensions, in a 4-bit layer."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

FIX_ID = "bnb-gemv-shape"
SHOWS = "the shape is|differs"
BEFORE = ((), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1))  # the features


def run(layer, x):
    """The output for ``x``, of the shape that ``torch.nn.Linear`` gives it."""
    with torch.no_grad():
        output = layer(x)
    expected = (*x.shape[:-1], layer.out_features)
    assert tuple(output.shape) == expected, f"the shape is {tuple(output.shape)}, not {expected}"
    return output.cpu()


@pytest.mark.parametrize("bias", [True, False], ids=["", "no bias"])
@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_shape_is_that_of_the_input(gpu, quant_type, double_quant, bias):
    device = gpu.devices[0]
    layer = four_bit.linear(device, quant_type, double_quant, bias=bias)
    row = four_bit.batch(device, rows=1)
    expected = run(layer, row).flatten()
    for before in BEFORE:
        output = run(layer, row.reshape(*before, -1)).flatten()
        assert torch.equal(output, expected), f"the output for {len(before) + 1} dimensions differs"


@pytest.mark.defect(FIX_ID, shows="size of tensor|same shape|the output differs|shape")
def test_the_norm_of_vq_diffusion(gpu):
    """It multiplies the embedding of a timestep, which has no batch."""
    from diffusers.models.normalization import AdaLayerNorm

    device = gpu.devices[0]
    torch.manual_seed(0)
    norm = AdaLayerNorm(64, num_embeddings=10).eval()
    quantized = torch.nn.Module()
    quantized.linear = four_bit.linear(device)  # [128, 128]: only its shapes count
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)).to(device)
    norm.emb = torch.nn.Embedding(10, four_bit.FEATURES)
    norm.to(device).linear = quantized.linear
    with torch.no_grad():
        output = norm(x, torch.tensor(3, device=device))
        scale, shift = run(quantized.linear, norm.silu(norm.emb(torch.tensor([3], device=device))))[0].chunk(
            2
        )
        expected = norm.norm(x) * (1 + scale.to(device)) + shift.to(device)
    assert torch.equal(output, expected), "the output differs"


def test_a_given_output_is_used(gpu):
    from bitsandbytes.functional import gemv_4bit

    device = gpu.devices[0]
    layer = four_bit.linear(device, bias=False)
    row = four_bit.batch(device, rows=1)
    out = torch.empty(1, four_bit.FEATURES, device=device)
    with torch.no_grad():
        gemv_4bit(row, layer.weight.t(), out, state=layer.weight.quant_state)
        assert torch.equal(out, layer(row))
