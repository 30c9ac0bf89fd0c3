"""bnb-int8-checkpoint-names: ``torch.distributed.checkpoint`` of an 8-bit model."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import distributed_state, eight_bit
from tests.fixes.distributed_state import state_dict as state_dict

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

FIX_ID = "bnb-int8-checkpoint-names"
SHOWS = "'Linear8bitLt' object has no attribute 'SCB'"


def zeroed(device):
    model = eight_bit.stack(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("place", ["the GPU", "the CPU"])
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "used"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_saved_and_loaded(gpu, state_dict, ran, place, tmp_path):
    import torch.distributed.checkpoint as dcp

    here = gpu.devices[0]
    expected = eight_bit.run(eight_bit.stack(here), here)
    source, model = eight_bit.stack(here), zeroed(here)
    if ran:
        eight_bit.run(source, here)
        eight_bit.run(model, here)
    if place == "the CPU":
        source.cpu()
    dcp.save({"model": state_dict.get_model_state_dict(source)}, checkpoint_id=tmp_path)
    loaded = state_dict.get_model_state_dict(model)
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    state_dict.set_model_state_dict(model, loaded)
    assert torch.equal(eight_bit.run(model, here), expected)
    assert torch.equal(eight_bit.run(source.to(here), here), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_of_what_is_trained_only(gpu, state_dict):
    distributed_state.assert_what_is_trained_only(eight_bit.stack(gpu.devices[0]), state_dict)


def test_the_attributes_are_in_nobodys_way(gpu):
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    names = list(model.state_dict())
    assert list(model.state_dict()) == names
    expected = eight_bit.run(model, here)
    assert torch.equal(eight_bit.run(copy.deepcopy(model), here), expected)
    assert torch.equal(eight_bit.run(pickle.loads(pickle.dumps(model)), here), expected)
