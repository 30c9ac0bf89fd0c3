"""diffusers-ace-step-tokenizer-weights: the audio tokenizer of ACE-Step with quantized layers."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.rig import models
from tests.sweep import backends

FIX_ID = "diffusers-ace-step-tokenizer-weights"
SHOWS = (
    r"mat1 and mat2 shapes|dtype of a .* cannot be changed|view size is not compatible|differs by"
    r"|is out of bounds for dimension"
)

torch = pytest.importorskip("torch")
ace_step = pytest.importorskip(
    "diffusers.pipelines.ace_step.modeling_ace_step", reason="this diffusers has no ACE-Step"
)
if not hasattr(ace_step, "_AceStepResidualFSQ"):
    pytest.skip("this ACE-Step has no audio tokenizer", allow_module_level=True)

DEFECT = pytest.mark.defect(FIX_ID, shows=SHOWS)
MARLIN = pytest.mark.skipif(
    bool(unmet("optimum-quanto>=0.2.7")),
    reason="on a GPU quanto before 0.2.7 packs float8 weights with code that it compiles (quanto-fp8-plain)",
)


def tokenizer():
    torch.manual_seed(0)
    return ace_step.AceStepAudioTokenizer(
        hidden_size=64,
        intermediate_size=128,
        audio_acoustic_hidden_dim=64,
        fsq_dim=64,
        num_attention_pooler_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ).eval()


def codes(model, device):
    """What the pipeline makes of audio codes."""
    indices = torch.arange(0, 64000, 4000, device=device)[None]
    with torch.no_grad():
        return model.quantizer.get_output_from_indices(indices).float().cpu()


def tokens(model, device, dtype=torch.bfloat16):
    """What it makes of a source audio."""
    generator = torch.Generator().manual_seed(1)
    audio = (torch.randn(1, 20, 64, generator=generator) * 3).to(device, dtype)
    with torch.no_grad():
        return model.tokenize(audio)[0].float().cpu()


def distance(one, other) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.saved(tokenizer(), tmp_path_factory.mktemp("ace"))


def load(folder, name, device):
    model = backends.ALL_BACKENDS[name](folder, torch.bfloat16, model_class=ace_step.AceStepAudioTokenizer)
    return model if name == "bnb-int8" else model.to(device)


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=DEFECT)
            for name in (
                "bnb-nf4",
                "bnb-nf4-bfloat16",
                "bnb-int8",
                "quanto-int8",
                "quanto-int4",
            )
        ),
        pytest.param("quanto-float8", marks=[DEFECT, MARLIN]),
        "torchao-int8",  # its weight is of a class that can be cast
    ],
)
@pytest.mark.parametrize("what", [codes, tokens])
def test_quantized(gpu, folder, name, what):
    device = gpu.devices[0]
    model = load(folder, name, device)
    out = what(model, device)
    expected = what(tokenizer().bfloat16().to(device), device)
    assert torch.isfinite(out).all()
    limit = 0.5 if what is tokens else 0.15  # a code near the border of two rounds to either
    assert distance(out, expected) < limit, f"differs by {distance(out, expected):.0%}"
    assert torch.equal(what(model, device), out)


def test_a_plain_one_takes_upstreams_way(gpu):
    device = gpu.devices[0]
    model, calls = tokenizer().bfloat16().to(device), []
    for layer in (model.quantizer.project_in, model.quantizer.project_out):
        layer.register_forward_hook(lambda *_: calls.append(1))
    codes(model, device), tokens(model, device)
    assert not calls
