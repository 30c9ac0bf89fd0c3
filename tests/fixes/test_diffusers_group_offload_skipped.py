"""diffusers-group-offload-skipped: group offloading with a stream loses track of layers that a cache skips."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import Interrupted, interrupt
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_left, modes, net, offload, skippable
from tests.rig import models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-skipped"
SHOWS = (
    r"parameters stayed|on the same (device|GPU)|should be the same|is on (cpu|cuda)|Expected a cuda device"
)

streams = modes("leaf-stream", "block-stream", "leaf-low", "leaf-record")


def assert_nothing_left(model):
    left = [name for name, parameter in model.named_parameters() if parameter.device.type != "cpu"]
    assert not left, f"parameters stayed on the GPU: {left}"


def build(kind: str, device):
    """A chain of blocks, of which ``model.skipped`` are left out from the second pass on."""
    linear = (lambda seed: four_bit.linear(device, seed=seed)) if kind == "4-bit" else plain
    return skippable(net(linear, blocks=4)).to(device)


def plain(seed: int):
    torch.manual_seed(seed)
    return torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES)


def run(model, device):
    with torch.no_grad():
        return model(torch.ones(2, four_bit.FEATURES, device=device)).cpu()


@streams
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("kind", ["plain", "4-bit"])
@pytest.mark.parametrize("skipped", [(1,), (1, 2), (3,), (1, 2, 3), (0,)], ids=str)
def test_skipped_blocks(gpu, kind, skipped, mode):
    device = gpu.devices[0]
    model, twin = build(kind, device), build(kind, device)
    offload(model, device, mode)
    for now in ((), skipped, skipped, (), skipped):
        model.skipped = twin.skipped = now
        assert torch.equal(run(model, device), run(twin, device))
        assert_nothing_left(model)
    interrupt(lambda: run(model, device), 0.5)
    for now in (skipped, ()):
        model.skipped = twin.skipped = now
        assert torch.equal(run(model, device), run(twin, device)), "after an interruption"
        assert_nothing_left(model)


@modes("leaf-stream", "leaf-low", "leaf-record")
@pytest.mark.defect(FIX_ID, shows=r"bytes stayed", needs="diffusers>=0.37")
@pytest.mark.parametrize("kind", ["plain", "4-bit"])
def test_a_layer_that_is_called_alone(gpu, kind, mode):
    """As ACE-Step calls the embedding of its text encoder: no other layer follows, so none is prefetched."""
    device = gpu.devices[0]
    model, twin = build(kind, device), build(kind, device)
    offload(model, device, mode)

    def alone(model):
        with torch.no_grad():
            return model.first(torch.ones(2, four_bit.FEATURES, device=device)).cpu()

    before = None
    for turn in range(4):
        assert torch.equal(run(model, device), run(twin, device))
        if before is None:
            before = gpu.allocated(device)
        for _ in range(turn):
            assert torch.equal(alone(model), alone(twin))
            assert_left(gpu, device, before)
    interrupt(lambda: run(model, device), 0.5)
    for _ in range(2):
        assert torch.equal(run(model, device), run(twin, device)), "after an interruption"
        assert torch.equal(alone(model), alone(twin))
        assert_left(gpu, device, before)


@streams
@pytest.mark.parametrize("kind", ["plain", "4-bit"])
def test_a_model_that_is_changed_after_a_stopped_pass(gpu, kind, mode):
    """As by a LoRA: the hooks come off, and on again with the same stream. What was fetched has new parameters."""
    reapply = getattr(diffusers.hooks.group_offloading, "_maybe_remove_and_reapply_group_offloading", None)
    if reapply is None:
        pytest.skip("this diffusers never takes the hooks off")
    device = gpu.devices[0]
    model, twin = build(kind, device), build(kind, device)
    offload(model, device, mode)
    for _ in range(2):
        run(model, device)
    for at in range(3):

        def stops(module, args):
            raise Interrupted

        handle = model.blocks[at][1].register_forward_pre_hook(stops)
        with pytest.raises(Interrupted):
            run(model, device)
        handle.remove()
        for one in (model, twin):
            for layer in (one.blocks[at][2], one.blocks[at + 1][0]):
                layer.bias = torch.nn.Parameter(layer.bias.cpu() * 2)
        reapply(model)
        twin.to(device)
        for _ in range(3):
            assert torch.equal(run(model, device), run(twin, device))
            assert_nothing_left(model)


ATTENTION = {"spatial_attention_block_skip_range": 2, "current_timestep_callback": lambda: 500}
CACHES = {"PyramidAttentionBroadcast": ATTENTION, "FirstBlockCache": {"threshold": 10.0}}


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@modes("leaf-stream")
def test_a_cache_that_is_enabled_first(gpu, mode):
    check_cache(gpu, "PyramidAttentionBroadcast", mode, first=True)


@modes("block-stream", "leaf-low")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache(gpu, cache, mode, first):
    check_cache(gpu, cache, mode, first)


def check_cache(gpu, cache, mode, first):
    """The output of the model that is not offloaded, and no weights on the GPU after each of two runs."""
    if not hasattr(diffusers, f"{cache}Config"):
        pytest.skip(f"this diffusers has no {cache}")
    device = gpu.devices[0]
    config = getattr(diffusers, f"{cache}Config")(**CACHES[cache])

    def outputs(offloaded):
        model = models.flux_transformer(num_layers=2, num_single_layers=2).to(device)
        if first:
            model.enable_cache(config)
        if offloaded:
            offload(model, device, mode)
        if not first:
            model.enable_cache(config)
        pipe = models.flux_pipeline(model)
        for steps in (3, 2):
            yield models.call_flux(pipe, device=device, dtype=torch.float32, steps=steps).cpu()
            if offloaded:
                assert_nothing_left(model)

    for one, other in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(one, other)
