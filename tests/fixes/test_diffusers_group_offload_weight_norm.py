"""diffusers-group-offload-weight-norm: layers with weight normalization in every mode of group offloading."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import audio
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import LEAF, assert_allowed, assert_works, modes, offload, stop

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")

FIX_ID = "diffusers-group-offload-weight-norm"
COMPUTED, OOBLECK = "diffusers-group-offload-computed-weight", "diffusers-oobleck-group-offload"
REFUSES = "does not support group offloading"
SHOWS = "same device|bytes stayed|bytes are on the device|left on the device|should be the same"


def codec():
    norm = torch.nn.utils.weight_norm

    class Codec(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = norm(torch.nn.Conv1d(4, 8, 3, padding=1))
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(norm(torch.nn.Conv1d(8, 8, 3, padding=1)), torch.nn.ELU())
                for _ in range(2)
            )
            self.last = norm(torch.nn.ConvTranspose1d(8, 4, 3, padding=1))

        def forward(self, sound):
            sound = self.first(sound)
            for block in self.blocks:
                sound = block(sound)
            return self.last(sound)

    torch.manual_seed(0)
    return Codec().eval().requires_grad_(False)


def run(model, device):
    """The output on the CPU; a model without hooks goes to the device."""
    if not any(hasattr(module, "_diffusers_hook") for module in model.modules()):
        model.to(device)
    sound = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(sound.to(device)).cpu()


@modes()
@pytest.mark.defect(COMPUTED, shows=SHOWS)
def test_layers(gpu, mode):
    device = gpu.devices[0]
    assert_works(gpu, device, codec, lambda model: run(model, device), mode)


def test_the_layers_are_given_back(gpu):
    device = gpu.devices[0]
    expected = run(codec(), device)
    model = codec()
    names = list(model.state_dict())
    for _ in range(2):
        offload(model, device, LEAF)
        assert torch.equal(run(model, device), expected)
        stop(model)
        assert list(model.state_dict()) == names
    model.to(device)
    with torch.no_grad():
        assert torch.equal(model(torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1)).to(device)).cpu(),
                           expected)  # fmt: skip
    for layer in (model.first, model.last):
        torch.nn.utils.remove_weight_norm(layer)
    assert torch.equal(run(model, device), expected)


@modes()
@pytest.mark.defect(OOBLECK, shows=REFUSES)
def test_stable_audio(gpu, mode):
    assert_allowed(gpu, mode, audio.oobleck, audio.run)


OTHERS = {
    "longcat": ("diffusers-longcat-audio-group-offload", "LongCatAudioDiTVae"),
    "cosmos3": ("diffusers-cosmos3-audio-group-offload", "Cosmos3AVAEAudioTokenizer"),
    "kvae": ("diffusers-kvae-audio-group-offload", "AutoencoderKLKVAEAudio"),
    "minimax": ("diffusers-minimax-audio-group-offload", "AutoencoderKLMiniMaxH3Audio"),
    "same": ("diffusers-same-group-offload", "AutoencoderSAME"),
}


@modes("leaf-stream", long=("block", "leaf", "block-stream"))
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.defect(target, shows=REFUSES))
        for name, (target, _) in OTHERS.items()
    ],
)
def test_other_autoencoders(gpu, name, mode):
    _, cls = OTHERS[name]
    if not hasattr(diffusers, cls):
        pytest.skip(f"this diffusers has no {cls}")
    assert_allowed(gpu, mode, getattr(audio, name), audio.run)
