"""`track` of a component of very many modules: cheap looks, of which nothing inexact is left unless it says so."""

from __future__ import annotations

import gc

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.placement import component_bytes, outline


@pytest.fixture(autouse=True)
def many(monkeypatch):
    """More than 50 modules are many."""
    monkeypatch.setattr(component_bytes, "MANY", 50)


@pytest.fixture
def complete(monkeypatch):
    """How many modules were looked at."""
    looked: list[int] = []
    tensors_of = outline.tensors_of

    def counted(modules):
        looked.append(len(modules))
        return tensors_of(modules)

    monkeypatch.setattr(outline, "tensors_of", counted)
    return looked


def _model(layers: int = 200):
    import torch

    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)) for _ in range(layers // 2)]
    return torch.nn.Sequential(torch.nn.Embedding(100, 8), *blocks)


def _bytes(track):
    return [sample.components["Sequential"] for sample in track.samples]


def test_inside_the_block_a_sample_of_the_modules_is_looked_at(complete):
    model = _model()
    with qf.track(model) as memory:
        pass
    assert max(complete) < 302 / 15
    exact = qf.audit(model).bytes
    assert _bytes(memory) == [exact, exact]
    assert [sample.allocated for sample in memory.samples] == [exact, exact]
    assert memory.peak == exact
    assert memory.estimated == []
    assert max(complete) == 302
    assert "estimate" not in memory.table()


def test_a_mark_looks_at_everything_and_makes_what_was_before_exact(complete):
    model = _model()
    with qf.track(model) as memory:
        memory.mark("here")
        exact = qf.audit(model).bytes
        assert complete[-1] == 302
        del model
        gc.collect()
    assert _bytes(memory) == [exact, exact, {}]
    assert memory.estimated == []


@pytest.mark.parametrize("change", ["dtype", "one block", "a new layer", "gone"])
def test_a_change_before_a_complete_look_leaves_an_estimate_that_says_so(change):
    import torch

    model = _model()
    before = qf.audit(model).bytes["cpu"]
    with qf.track(model) as memory:
        if change == "dtype":
            model.double()
        elif change == "one block":
            for block in model[1:20]:
                block.half()
        elif change == "a new layer":
            model[5].append(torch.nn.Linear(8, 8))
        else:
            del model
            gc.collect()
    (start, end) = _bytes(memory)
    assert start["cpu"] == pytest.approx(before, rel=0.5)
    assert end == ({} if change == "gone" else qf.audit(model).bytes)
    assert memory.estimated == ["Sequential"]
    assert memory.to_dict()["estimated"] == ["Sequential"]
    assert "some bytes of Sequential are estimates" in memory.table()


def test_a_component_with_offload_hooks_is_looked_at_completely(gpu, complete):
    pytest.importorskip("accelerate")
    from accelerate import cpu_offload_with_hook

    model = _model()
    model, _ = cpu_offload_with_hook(model, gpu.devices[0])
    with qf.track(model) as memory:
        assert max(complete) == 302
    assert memory.estimated == []


def test_a_small_component_beside_it_is_exact_at_once():
    import torch

    small = torch.nn.Linear(4, 4)
    with qf.track({"large": _model(), "small": small}) as memory:
        small.double()
    assert [sample.components["small"] for sample in memory.samples] == [{"cpu": 80}, {"cpu": 160}]
    assert memory.estimated == ["large"]  # it is gone
