"""Every cache of diffusers that Flux takes, and its hook that skips feed-forwards, put on a model before it is placed
or after: the outputs are those of the same on one device, with no weight left there, and without the cache those of the
model that never had one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.gate import unmet
from tests.marks import rest_is_whole
from tests.rig import models
from tests.sweep.backends import ALL_BACKENDS
from tests.sweep.placements import OFFLOADS, PLACEMENTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="the sweep is about the newest releases"),
]

STEPS = 6
# FasterCache needs two steps before.
LATER = (-1, 700)
# The options with which the cache is used in a run of so few steps.
CACHES: dict[str, dict] = {
    "FirstBlockCache": {"threshold": 10.0},
    "PyramidAttentionBroadcast": {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": LATER,
    },
    "FasterCache": {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": LATER,
        "is_guidance_distilled": True,
        "tensor_format": "BCHW",
        "attention_weight_callback": lambda module: 0.5,
    },
    "MagCache": {"mag_ratios": [1.0] * STEPS, "num_inference_steps": STEPS},
    "TaylorSeerCache": {"cache_interval": 2, "disable_cache_before_step": 2},
}


def _cached(name: str) -> Callable:
    def enable(pipe):
        import diffusers

        options = dict(CACHES[name])
        if "spatial_attention_block_skip_range" in options:
            options["current_timestep_callback"] = lambda: pipe.current_timestep
        pipe.transformer.enable_cache(getattr(diffusers, f"{name}Config")(**options))
        return pipe.transformer.disable_cache

    return enable


def _feed_forward_skip(pipe):
    import diffusers
    from diffusers.hooks import layer_skip

    config = diffusers.LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False)
    diffusers.hooks.apply_layer_skip(pipe.transformer, config)
    return _without(pipe.transformer, layer_skip._LAYER_SKIP_HOOK)


def _nothing() -> None:
    """There is no cache."""


def _without(model, name: str) -> Callable:
    from diffusers.hooks import HookRegistry

    registry = HookRegistry.check_if_exists_or_initialize(model)
    return lambda: registry.remove_hook(name, recurse=True)


ENABLE: dict[str, Callable] = {
    **{name: _cached(name) for name in CACHES},
    "feed-forward skip": _feed_forward_skip,
}
NO_CACHE = "none"
PLACED = [name for name in PLACEMENTS if name in OFFLOADS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = models.flux_transformer(num_layers=2, num_single_layers=2)
    return models.saved(model, tmp_path_factory.mktemp("flux"))


_references: dict = {}


def outputs(gpu, saved, backend, placement, cache, first) -> list:
    """Two runs with the cache, and one without it; what is left on the devices after each is none."""
    import torch

    here = gpu.devices[0]
    pipe = models.flux_pipeline(ALL_BACKENDS[backend](saved, torch.bfloat16, None))
    pipe.to("cpu")
    model = pipe.transformer
    disable = _nothing
    if first and cache != NO_CACHE:
        disable = ENABLE[cache](pipe)
    PLACEMENTS[placement](pipe, here, gpu.devices[-1])
    if not first:
        disable = ENABLE[cache](pipe)

    def run():
        output = models.call_flux(pipe, device=here, dtype=torch.bfloat16, steps=STEPS).cpu()
        if placement == "model offload":
            pipe.maybe_free_model_hooks()
        if placement != "to":
            left = [name for name, one in model.named_parameters() if one.device.type == "cuda"]
            assert not left, f"parameters stayed on the device: {left}"
        return output

    found = [run(), run()]
    disable()
    return [*found, run()]


NOW = ("model offload", "sequential", "group, leaf, stream", "group, block, stream")


@pytest.mark.parametrize(
    "first", [True, pytest.param(False, marks=pytest.mark.long)], ids=["before", "after"]
)
@pytest.mark.parametrize("cache", ENABLE)
@pytest.mark.parametrize(
    ("backend", "placement"),
    rest_is_whole(itertools.product(ALL_BACKENDS, PLACED), *itertools.product(["bnb-nf4"], NOW)),
)
def test_cache(gpu, backend, placement, cache, first, saved):
    import torch

    expected, without = reference(gpu, saved, backend, cache), reference(gpu, saved, backend, NO_CACHE)
    assert not torch.equal(expected[0], without[0]), "the cache has no effect"
    assert torch.equal(expected[2], without[2]), "disabling the cache leaves something"
    found = outputs(gpu, saved, backend, placement, cache, first)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), f"off by {(one - other).abs().max()}"


def reference(gpu, saved, backend, cache) -> list:
    """The outputs on one device."""
    if (backend, cache) not in _references:
        _references[backend, cache] = outputs(gpu, saved, backend, "to", cache, first=True)
    return _references[backend, cache]
