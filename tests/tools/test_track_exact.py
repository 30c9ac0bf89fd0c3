"""`track`: what it keeps from one sample to the next is never out of date, and watching keeps nothing alive."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory import Track
from tests.rig import models
from tests.tools.pipelines import flux

WAYS = ("resident", "model", "sequential", "leaf_level", "block_level", "leaf_level stream")


def _offload(pipeline, way: str, device) -> None:
    if way == "resident":
        pipeline.transformer.to(device)
    elif way in ("model", "sequential"):
        getattr(pipeline, f"enable_{way}_cpu_offload")(device=device)
    else:
        level, _, stream = way.partition(" ")
        if not hasattr(pipeline.transformer, "enable_group_offload"):
            pytest.skip("this diffusers has no group offloading")
        blocks = {"num_blocks_per_group": 1} if level == "block_level" else {}
        pipeline.transformer.enable_group_offload(
            onload_device=device, offload_type=level, use_stream=bool(stream), **blocks
        )


@pytest.fixture
def recounted(monkeypatch):
    """Count everything again after every sample, with `audit`, and compare; yields the number of comparisons."""
    compared: list[str] = []
    take = Track._take

    def checked(self, label, seconds=None):
        targets = {name: component() for name, component in self._bytes._components.items()}
        take(self, label, seconds)
        again = qf.audit(targets).component_bytes()
        for name, counted in self.samples[-1].components.items():
            assert {d: n for d, n in counted.items() if n} == {
                d: n for d, n in again.get(name, {}).items() if n
            }, (label, name)
        compared.append(label)

    monkeypatch.setattr(Track, "_take", checked)
    return compared


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_every_sample_equals_a_full_count(gpu, tmp_path, recounted, bits, way):
    here = gpu.devices[0]
    pipeline = flux(tmp_path, bits)
    _offload(pipeline, way, here)
    with qf.track(pipeline, interval=0) as memory:
        models.call_flux(pipeline, here, steps=2)
        pipeline.maybe_free_model_hooks()
        memory.mark("hooks freed")
        models.call_flux(pipeline, here, steps=1)
    assert len(recounted) == len(memory.samples) == 9
    if gpu.kind == "rig":
        assert memory.samples[-1].allocated[str(here)] == gpu.allocated(here)


@pytest.mark.parametrize("way", ["model", "sequential", "leaf_level"])
def test_the_peak_is_that_of_a_run_without_track(gpu, tmp_path, way):
    here = gpu.devices[0]
    pipeline = flux(tmp_path, 4)
    _offload(pipeline, way, here)
    models.call_flux(pipeline, here)
    gpu.reset()
    models.call_flux(pipeline, here)
    alone = gpu.peak(here)
    for interval in (0, None, 1000.0):
        with qf.track(pipeline, interval=interval) as memory:
            models.call_flux(pipeline, here)
        assert memory.peak[str(here)] == alone


def test_what_changes_in_place_is_seen(recounted):
    """The same parameter objects, with other memory behind them."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    layer = model[0]
    with qf.track(model, interval=0) as memory:
        for what, change in {
            "other dtype": lambda: model.to(torch.float64),
            "a part of it": lambda: setattr(layer.weight, "data", layer.weight.data[:3]),
            "every other column": lambda: setattr(layer.weight, "data", layer.weight.data[:, ::2]),
            "tied": lambda: setattr(model[1], "weight", layer.weight),
            "a gradient": lambda: setattr(layer.bias, "grad", torch.ones_like(layer.bias)),
            "an attribute": lambda: setattr(layer, "cache", [torch.ones(100)]),
            "another attribute for a number": lambda: setattr(layer, "in_features", torch.ones(50)),
            "on meta": lambda: setattr(model[1], "bias", torch.nn.Parameter(model[1].bias.to("meta"))),
            "another layer": lambda: model.append(torch.nn.Linear(8, 8)),
            "one layer less": lambda: model.pop(0),
        }.items():
            change()
            memory.mark(what)
    totals = [sample.components["Sequential"]["cpu"] for sample in memory.samples[:-1]]
    assert all(one != other for one, other in itertools.pairwise(totals)), totals
    assert len(recounted) == 12


def test_a_component_given_up_in_the_block_is_freed(gpu):
    here = gpu.devices[0]
    pipeline = models.flux_pipeline(text=True)
    pipeline.text_encoder.to(here)
    held = gpu.allocated(here)
    with qf.track(pipeline) as memory:
        gone = weakref.ref(pipeline.text_encoder)
        pipeline.text_encoder = None
        gc.collect()
        memory.mark("given up")
    assert gone() is None
    assert memory.samples[0].components["text_encoder"][str(here)] == held
    assert memory.samples[1].components["text_encoder"] == {}
    assert gpu.allocated(here) == 0


def test_the_parts_of_a_component_are_watched_until_it_is_called_as_a_whole():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with qf.track(model, interval=0) as memory:
        model[0](torch.ones(1, 4))
        assert [sample.label for sample in memory.samples[1:]] == ["Sequential begins", "Sequential ends"]
        assert model[1]._forward_hooks
        model(torch.ones(1, 4))
        assert len(memory.samples) == 5
        assert not model[1]._forward_hooks
        model(torch.ones(1, 4))
        assert len(memory.samples) == 7
    assert not model._forward_hooks


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def deeper(call, frames=5):
    return deeper(call, frames - 1) if frames else call()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", [lambda call: call(), in_a_thread], ids=["here", "in a thread"])
@pytest.mark.parametrize("then", [lambda call: call(), deeper], ids=["as deep", "deeper"])
def test_calls_after_one_that_was_left_are_sampled(kind, where, then):
    """torch calls no hook after an error that is no Exception, as Ctrl-C in a notebook; then no call was seen again."""
    import torch

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.left, self.again = torch.nn.Linear(4, 4), None, True

        def forward(self, x):
            if self.left is not None:
                raise self.left
            self.again = not self.again
            return self.layer(x) if self.again else self(x)

    def leaves():
        model.first.left = kind()
        with contextlib.suppress(kind):
            model.first(torch.ones(1, 4))
        model.first.left = None

    model = torch.nn.Module()
    model.first, model.second = Part(), Part()
    with qf.track(model, interval=0) as memory:
        for part in (model.first, model.second):
            where(leaves)
            memory.samples.clear()
            for _ in range(2):
                then(lambda part=part: part(torch.ones(1, 4)))
            labels = [sample.label for sample in memory.samples]
            assert labels == ["Module begins", "Module ends"] * 2
