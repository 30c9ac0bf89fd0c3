"""bnb-int8-input-layout: 8-bit layers and inputs of four and more dimensions."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, four_bit
from tests.rig import models

FIX_ID = "bnb-int8-input-layout"
SHOWS = (
    r"size of tensor a \(\d+\) must match the size of tensor b|shape|AssertionError|self must be a matrix|out of bounds"
    r"|Dimension out of range|UnboundLocalError: (cannot access )?local variable 'rows'"
)

torch = pytest.importorskip("torch")

SHAPES = pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 5), (2, 1, 3, 2)], ids=str)


def inputs(device, shape, outliers: bool):
    """[*shape, features] in 16 bits, with a column of outliers or without."""
    made = torch.randn(*shape, eight_bit.FEATURES, generator=torch.Generator().manual_seed(7)) / 4
    if outliers:
        made[..., 5] += 20
    return made.half().to(device)


@SHAPES
@pytest.mark.parametrize("outliers", [False, True], ids=["plain", "outliers"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_layer(gpu, shape, outliers):
    device = gpu.devices[0]
    layer, given = eight_bit.linear(device), inputs(device, shape, outliers)
    with torch.no_grad():
        expected = layer(given.flatten(0, -2))
        out = layer(given)
        assert out.shape == (*shape, eight_bit.FEATURES)
        assert torch.equal(out.flatten(0, -2), expected)
        assert torch.equal(layer(given), out)


@pytest.mark.parametrize("outliers", [False, True], ids=["plain", "outliers"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.47")
def test_a_vector(gpu, outliers):
    device = gpu.devices[0]
    layer, given = eight_bit.linear(device), inputs(device, (3,), outliers)
    with torch.no_grad():
        out = layer(given[0])
        assert out.shape == (eight_bit.FEATURES,)
        assert torch.equal(out, layer(given[:1])[0])


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_part_of_wider_tokens(gpu):
    """Its rows are not one after another in memory."""
    device = gpu.devices[0]
    layer, wide = eight_bit.linear(device), inputs(device, (2, 3, 4), outliers=False).repeat(1, 1, 1, 2)
    given = wide[..., : eight_bit.FEATURES]
    with torch.no_grad():
        assert torch.equal(layer(given), layer(given.contiguous()))


@pytest.mark.parametrize("part", ["first token", "one token each", "transposed"])
@pytest.mark.defect(FIX_ID, shows="other rows")
def test_a_part_of_a_batch(gpu, part):
    device = gpu.devices[0]
    layer, whole = eight_bit.linear(device), inputs(device, (2, 3), outliers=False)
    if part == "transposed":
        given = whole.flatten(0, 1).t().contiguous().t()
    else:
        given = whole[:, 0] if part == "first token" else whole[:, :1]
    assert not given.is_contiguous()
    with torch.no_grad():
        assert torch.equal(layer(given), layer(given.contiguous())), "other rows were read"


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_gradients(gpu, threshold):
    device = gpu.devices[0]
    layer = eight_bit.linear(device, threshold=threshold)
    layer.bias.requires_grad_(False)
    flat = inputs(device, (24,), outliers=False).requires_grad_()
    layer(flat).float().square().sum().backward()
    given = flat.detach().view(2, 3, 4, -1).requires_grad_()
    layer(given).float().square().sum().backward()
    assert torch.equal(given.grad.flatten(0, -2), flat.grad)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("bitsandbytes>=0.46", "torch>=2.8"))
def test_a_layer_on_the_cpu():
    layer, given = eight_bit.linear("cpu").eval(), inputs("cpu", (2, 3, 4), outliers=True)
    with torch.no_grad():
        assert torch.equal(layer(given).flatten(0, -2), layer(given.flatten(0, -2)))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.32", "bitsandbytes>=0.45"))
def test_allegro(gpu, tmp_path):
    from diffusers import AllegroTransformer3DModel

    torch.manual_seed(0)
    plain = AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=96,
        num_layers=1,
        cross_attention_dim=192,
        caption_channels=64,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
    ).eval()
    model = four_bit.load(
        AllegroTransformer3DModel, models.saved(plain, tmp_path), bits=8, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)

    def run(model, device):
        generator.manual_seed(0)
        with torch.no_grad():
            return model(
                torch.randn(2, 4, 2, 8, 8, generator=generator).to(device),
                encoder_hidden_states=torch.randn(2, 1, 4, 64, generator=generator).to(device),
                timestep=torch.tensor([3, 3], device=device),
                encoder_attention_mask=torch.ones(2, 4, device=device),
                return_dict=False,
            )[0].cpu()

    expected, out = run(plain, "cpu"), run(model, gpu.devices[0])
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < 0.02, f"the rounding of int8 is below 2 %, the output differs by {error:.1%}"


def test_what_is_no_wider_goes_its_way(gpu):
    """An input of one, two or three dimensions reaches bitsandbytes as it is, and so does one without an element."""
    device = gpu.devices[0]
    layer = eight_bit.linear(device)
    with torch.no_grad():
        rows = layer(inputs(device, (6,), outliers=False))
        assert torch.equal(layer(inputs(device, (2, 3), outliers=False)).flatten(0, 1), rows)
        assert layer(inputs(device, (2, 0, 3), outliers=False)).shape == (2, 0, 3, eight_bit.FEATURES)


def test_in_one_graph():
    from tests.gate import ONE_GRAPH, unmet

    for requirement in (ONE_GRAPH["8-bit"], "bitsandbytes>=0.48"):
        if reason := unmet(requirement):
            pytest.skip(reason)
    layer, given = eight_bit.linear("cpu"), inputs("cpu", (2, 3, 4), outliers=False)
    with torch.no_grad():
        expected = layer(given)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(given), expected)
