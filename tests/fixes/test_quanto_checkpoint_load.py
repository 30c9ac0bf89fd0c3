"""quanto-checkpoint-load: accelerate and torch.distributed load a checkpoint of quanto's weights without effect."""

from __future__ import annotations

import itertools

import pytest

from tests.fixes import quanto_models as q
from tests.fixes.merged import assert_same, bits
from tests.gate import unmet
from tests.marks import rest_is_long

FIX_ID = "quanto-checkpoint-load"
SHOWS = "not what it was"
pytestmark = pytest.mark.skipif(bool(unmet("torch>=2.4")), reason="the options came with torch 2.4")
qtypes = pytest.mark.parametrize("qtype", q.QTYPES)


def other(model, qtype: str, frozen: bool = True):
    """A model with other weights, and other biases."""
    import torch

    found = q.layers(qtype) if frozen else q.plain_layers()
    if not frozen:
        q.quanto().quantize(found, weights=getattr(q.quanto(), qtype))
    with torch.no_grad():
        for layer in found:
            layer.bias.add_(1)
            (layer.weight._scale if frozen else layer.weight).mul_(2)
    return found


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="accelerate>=1.7")
@pytest.mark.parametrize("safe", [True, False])
@qtypes
def test_load_checkpoint_in_model(tmp_path, qtype, safe):
    from accelerate import Accelerator, load_checkpoint_in_model

    model = q.layers(qtype)
    Accelerator(cpu=True).save_model(model, tmp_path, safe_serialization=safe)
    loaded = other(model, qtype)
    load_checkpoint_in_model(loaded, str(tmp_path))
    assert_same(bits(loaded), bits(model))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torch>=2.4")
@qtypes
def test_set_model_state_dict(qtype):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = q.layers(qtype)
    loaded = other(model, qtype)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(loaded, model.state_dict(), options=options)
    assert_same(bits(loaded), bits(model))


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@qtypes
def test_a_state_dict_is_loaded_as_before(qtype, frozen, assign):
    import torch

    model = q.layers(qtype)
    loaded = other(model, qtype, frozen)
    names = set(model.state_dict())
    assert not any(loaded.load_state_dict(model.state_dict(), assign=assign))
    assert_same(bits(loaded), bits(model))
    assert torch.equal(q.run(loaded), q.run(model)) and set(loaded.state_dict()) == names


def test_a_part_of_a_checkpoint_leaves_the_rest():
    """A layer that the checkpoint does not have keeps its weight; a plain weight is taken as before."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = q.layers("qint8")
    loaded = other(model, "qint8")
    before = bits(loaded)
    part = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("0.")}
    set_model_state_dict(loaded, part, options=StateDictOptions(full_state_dict=True, strict=False))
    for name, found in bits(loaded).items():
        assert found.equal((bits(model) if name.startswith("0.") else before)[name]), name


@pytest.mark.skipif(bool(unmet("accelerate>=1.7")), reason="before, it does not load such a checkpoint")
@pytest.mark.parametrize(
    ("qtype", "dtype"),
    rest_is_long(itertools.product(q.QTYPES, ["float32", "bfloat16"]), ("qint4", "bfloat16")),
)
def test_a_weight_in_two_files(tmp_path, qtype, dtype):
    """The tensors inside of it lie in different files; in one file alone they are missing for ``strict``."""
    import torch
    from accelerate import Accelerator, load_checkpoint_in_model

    model = q.layers(qtype, getattr(torch, dtype))
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.iterdir())) > 4
    loaded = q.layers(qtype, getattr(torch, dtype))
    with torch.no_grad():
        for layer in loaded:
            layer.weight = torch.nn.Parameter(torch.randn(layer.weight.shape, dtype=layer.weight.dtype))
    q.quanto().freeze(loaded)
    load_checkpoint_in_model(loaded, str(tmp_path))
    assert_same(bits(loaded), bits(model))
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight\._scale"):
        load_checkpoint_in_model(loaded, str(tmp_path), strict=True)
