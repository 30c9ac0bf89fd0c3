"""diffusers-called-by-parts: what a pipeline runs past ``forward`` is brought to its device under offload."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import modes, offload
from tests.marks import rest_is_long

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

ENCODER, MODULAR, BOTTLENECK, DECODER, OLD_DECODER = (
    "diffusers-ideogram4-encoder",
    "diffusers-ideogram4-modular-encoder",
    "diffusers-same-bottleneck",
    "diffusers-unidiffuser-decoder",
    "diffusers-unidiffuser-decoder-old",
)
CPU = "the text encoder ran on the CPU"
SHOWS = rf"{CPU}|Expected all tensors to be on the same device"
META = "not on the expected device|the output has no data"


PIPELINE = ("diffusers.pipelines.ideogram4.pipeline_ideogram4", "Ideogram4Pipeline")
BLOCKS = ("diffusers.modular_pipelines.ideogram4.encoders", "Ideogram4TextEncoderStep")
DOORS = pytest.mark.parametrize(
    "door",
    [
        pytest.param(PIPELINE, marks=pytest.mark.defect(ENCODER, shows=SHOWS), id="pipeline"),
        pytest.param(BLOCKS, marks=pytest.mark.defect(MODULAR, shows=SHOWS), id="blocks"),
    ],
)
FUNCTION = "_get_text_encoder_hidden_states"


@pytest.fixture
def prepared(gpu, door, monkeypatch):
    """(the function, the encoder on the CPU, its output on the device, bytes on the device without it)."""
    from diffusers_quantfix.verify.models import ideogram

    module = pytest.importorskip(door[0])
    monkeypatch.setattr(module, "QWEN3_VL_ACTIVATION_LAYERS", (0, 1))
    function, device = getattr(getattr(module, door[1]), FUNCTION), gpu.devices[0]
    encoder = ideogram.text_encoder(layers=2)
    before = gpu.allocated(device)
    expected = encoded(function, encoder.to(device))
    return function, encoder.to("cpu"), expected, before


def encoded(function, encoder):
    """What the pipeline makes of the states and its mask; the inputs lie beside the first parameter, where it puts
    them."""
    from diffusers_quantfix.verify.models import ideogram

    device = next(encoder.parameters()).device
    with torch.no_grad():
        states = ideogram.states(function, encoder, device)
        mask = torch.ones(1, ideogram.TOKENS, 1, device=device)
        return (torch.stack(states, -1).flatten(2) * mask).cpu()


def check(prepared, encoder, left):
    function, _, expected, _ = prepared

    def right(output):
        assert torch.equal(output, expected), CPU
        left()

    for _ in range(2):
        right(encoded(function, encoder))
    assert_goes_on(lambda: encoded(function, encoder), right, (0.5,))


@DOORS
def test_model_offload(gpu, prepared):
    from accelerate import cpu_offload_with_hook

    encoder, hook = cpu_offload_with_hook(prepared[1], spelled(gpu.devices[0]))

    def left():
        hook.offload()
        assert gpu.allocated(gpu.devices[0]) == prepared[-1], "bytes stayed on the device"

    check(prepared, encoder, left)


@DOORS
@modes("leaf", "block", "leaf-stream", "block-stream")
def test_group_offload(gpu, prepared, mode):
    offload(prepared[1], gpu.devices[0], mode)

    def left():
        assert gpu.allocated(gpu.devices[0]) <= prepared[-1], "bytes stayed on the device"

    check(prepared, prepared[1], left)


@pytest.mark.parametrize("door", [PIPELINE, BLOCKS], ids=["pipeline", "blocks"])
def test_without_offload(gpu, prepared):
    function, encoder, expected, _ = prepared
    assert torch.equal(encoded(function, encoder.to(gpu.devices[0])), expected)


@pytest.mark.defect(BOTTLENECK, shows=META)
@pytest.mark.parametrize("method", ["encode", "decode"])
def test_bottleneck_under_sequential_offload(gpu, method):
    from accelerate import cpu_offload

    module = pytest.importorskip("diffusers.models.autoencoders.autoencoder_same")
    device = gpu.devices[0]
    bottleneck = module.SoftNormBottleneck(2).requires_grad_(False)
    torch.nn.init.normal_(bottleneck.scale, generator=torch.Generator().manual_seed(0))
    sound = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(1)).to(device)
    expected = getattr(bottleneck.to(device), method)(sound).cpu()
    cpu_offload(bottleneck.to("cpu"), spelled(device), offload_buffers=True)
    for _ in range(2):
        output = getattr(bottleneck, method)(sound)
        assert not output.is_meta, "the output has no data"
        assert torch.equal(output.cpu(), expected)
    assert all(parameter.is_meta for parameter in bottleneck.parameters())


@pytest.mark.parametrize("run", ["encode", "captions"])
@pytest.mark.defect(DECODER, shows="same device", needs="diffusers>=0.38")
@pytest.mark.defect(OLD_DECODER, shows="same device", needs="diffusers<0.38")
def test_the_decoder_of_unidiffuser_under_model_offload(gpu, run):
    from accelerate import cpu_offload_with_hook

    from diffusers_quantfix.verify.models import unidiffuser

    device = gpu.devices[0]
    run = getattr(unidiffuser, run)
    expected = run(unidiffuser.text_decoder().to(device), device)
    before = gpu.allocated(device)
    decoder, hook = cpu_offload_with_hook(unidiffuser.text_decoder(), spelled(device))

    def run_and_offload():
        output = run(decoder, device)
        hook.offload()
        return output

    def right(output):
        assert torch.equal(output, expected)
        assert gpu.allocated(device) == before, "bytes stayed on the device"

    for _ in range(2):
        right(run_and_offload())
    assert_goes_on(run_and_offload, right)


@modes("block", "leaf-stream", long=("leaf", "block-stream"))
@pytest.mark.parametrize("run", rest_is_long(["encode", "captions"], "encode"))
def test_the_decoder_of_unidiffuser_in_groups(gpu, run, mode):
    pytest.importorskip(
        "diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0"
    )
    from diffusers_quantfix.verify.models import unidiffuser

    device = gpu.devices[0]
    run = getattr(unidiffuser, run)
    expected = run(unidiffuser.text_decoder().to(device), device)
    before = gpu.allocated(device)
    decoder = unidiffuser.text_decoder()
    offload(decoder, device, mode)
    for _ in range(2):
        assert torch.equal(run(decoder, device), expected)
        assert gpu.allocated(device) <= before, "bytes stayed on the device"
