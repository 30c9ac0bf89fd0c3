"""diffusers-anyflow-embedder-dtype and its twin: AnyFlow with quantized layers follows the size of its step."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.gate import ONE_GRAPH, unmet
from tests.rig import models

PLAIN = "diffusers-anyflow-embedder-dtype"
FAR = "diffusers-anyflow-far-embedder-dtype"
SHOWS = r"not implemented for '(Byte|Char)'|AssertionError|must be floating|the same dtype"

torch = pytest.importorskip("torch")
# No skip of the whole file: then nobody sees that the second fix has tests, too.
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.39")), reason="AnyFlow came with diffusers 0.39")

BOTH = pytest.mark.parametrize(
    "name",
    [
        pytest.param("AnyFlowTransformer3DModel", marks=pytest.mark.defect(PLAIN, shows=SHOWS)),
        pytest.param("AnyFlowFARTransformer3DModel", marks=pytest.mark.defect(FAR, shows=SHOWS)),
    ],
)
GATE = 0.25


def model_of(name):
    import diffusers

    torch.manual_seed(0)
    options = {"chunk_partition": (1, 1)} if "FAR" in name else {}
    return getattr(diffusers, name)(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=128,
        num_layers=1,
        gate_value=GATE,
        **options,
    ).eval()


def embedding_of(name):
    return model_of(name).condition_embedder


def quantize(embedding, device, bits: int):
    """The layers that diffusers quantizes: all but those of ``time_embedder``."""
    from bitsandbytes import nn

    for child, layer in (("delta_embedder", "linear_1"), ("delta_embedder", "linear_2")):
        parent = embedding.get_submodule(child)
        plain = getattr(parent, layer)
        if bits == 4:
            made = nn.Linear4bit(plain.in_features, plain.out_features, True, torch.float32, quant_type="nf4")
        else:
            made = nn.Linear8bitLt(
                plain.in_features, plain.out_features, has_fp16_weights=False, threshold=6.0
            )
        made.load_state_dict(plain.state_dict())
        setattr(parent, layer, made)
    return embedding.to(device)


def embedded(embedding, device, step: float):
    time, text = torch.full((1, 1), 900.0, device=device), torch.zeros(1, 1, 64, device=device)
    with torch.no_grad():
        return embedding.forward_timestep(time, torch.full_like(time, step), text, 1)[0].cpu()


@pytest.mark.parametrize("bits", [4, 8])
@BOTH
def test_the_embedding(gpu, name, bits):
    device = gpu.devices[0]
    plain = embedding_of(name)
    expected = [embedded(plain, "cpu", step) for step in (0.0, 500.0)]
    quantized = quantize(embedding_of(name), device, bits)
    found = [embedded(quantized, device, step) for step in (0.0, 500.0)]
    change, right = found[1] - found[0], expected[1] - expected[0]
    assert right.norm() > 0.01, "the size of the step should matter"
    error = ((change - right).norm() / right.norm()).item()
    assert error < {4: 0.4, 8: 0.05}[bits], f"the effect of the step's size differs by {error:.0%}"
    assert torch.equal(embedded(quantized, device, 500.0), found[1])
    assert quantized.delta_emb_gate.item() == GATE


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(PLAIN, shows=SHOWS)
def test_a_model_from_a_checkpoint(gpu, tmp_path, bits):
    plain, device = model_of("AnyFlowTransformer3DModel"), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        model.to(device)
    assert type(model.condition_embedder.delta_embedder.linear_1) is not torch.nn.Linear

    def run(model, device, step):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return model(
                torch.randn(1, 2, 4, 8, 8, generator=generator).to(device),
                torch.full((1, 2), 900.0, device=device),
                torch.full((1, 2), step, device=device),
                torch.randn(1, 4, 64, generator=generator).to(device),
                return_dict=False,
            )[0].cpu()

    expected, found = (
        [run(one, where, step) for step in (0.0, 500.0)] for one, where in ((plain, "cpu"), (model, device))
    )
    for one, other in zip(expected, found, strict=True):
        error = ((other - one).norm() / one.norm()).item()
        assert error < {4: 0.3, 8: 0.05}[bits], f"the output differs by {error:.0%}"
    assert not torch.equal(*found), "the size of the step has no effect"


@pytest.mark.parametrize("name", ["AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel"])
def test_after_an_interruption(gpu, name):
    device = gpu.devices[0]
    quantized = quantize(embedding_of(name), device, 4)
    expected = embedded(quantized, device, 500.0)

    def interrupted(*_):
        raise KeyboardInterrupt

    handle = quantized.delta_embedder.linear_2.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded(quantized, device, 500.0)
    handle.remove()
    assert torch.equal(embedded(quantized, device, 500.0), expected)


def test_in_one_graph():
    for requirement in (ONE_GRAPH["4-bit"], "bitsandbytes>=0.50"):
        if reason := unmet(requirement):
            pytest.skip(reason)
    quantized = quantize(embedding_of("AnyFlowTransformer3DModel"), "cpu", 4)
    expected = embedded(quantized, "cpu", 500.0)
    quantized.forward_timestep = torch.compile(
        quantized.forward_timestep, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(embedded(quantized, "cpu", 500.0), expected)
