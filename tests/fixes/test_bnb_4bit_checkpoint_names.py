"""bnb-4bit-checkpoint-names: ``torch.distributed.checkpoint`` of a 4-bit model."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import distributed_state, four_bit
from tests.fixes.distributed_state import state_dict as state_dict

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

FIX_ID = "bnb-4bit-checkpoint-names"
SHOWS = "'Params4bit' object has no attribute 'absmax'"
# What set_model_state_dict meets next.
RELOAD = pytest.mark.defect("bnb-linear4bit-reload", shows=r"Unexpected key\(s\) in state_dict: .*absmax")


def other(device, quant_type, double_quant):
    """The same layers with other weights."""
    parts = [four_bit.linear(device, quant_type, double_quant, seed=seed) for seed in (7, 8)]
    norm = torch.nn.LayerNorm(four_bit.FEATURES, device=device)
    return torch.nn.Sequential(parts[0], norm, parts[1]).eval()


@four_bit.quantizations
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "used"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@RELOAD
def test_saved_and_loaded(gpu, state_dict, quant_type, double_quant, ran, tmp_path):
    import torch.distributed.checkpoint as dcp

    here = gpu.devices[0]
    source = four_bit.stack(here, quant_type, double_quant)
    expected = four_bit.run(four_bit.stack(here, quant_type, double_quant), here)
    model = other(here, quant_type, double_quant)
    if ran:
        four_bit.run(source, here)
        four_bit.run(model, here)
    dcp.save({"model": state_dict.get_model_state_dict(source)}, checkpoint_id=tmp_path)
    loaded = state_dict.get_model_state_dict(model)
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    state_dict.set_model_state_dict(model, loaded)
    assert torch.equal(four_bit.run(model, here), expected)
    assert torch.equal(four_bit.run(source, here), expected)
    assert four_bit.differences(source.state_dict(), model.state_dict()) == []


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_of_what_is_trained_only(gpu, state_dict):
    distributed_state.assert_what_is_trained_only(four_bit.stack(gpu.devices[0]), state_dict)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@RELOAD
def test_training_is_resumed(gpu, state_dict, tmp_path):
    """Two steps, a checkpoint, two more: the same losses in a new model with its optimizer."""
    import torch.distributed.checkpoint as dcp

    here = gpu.devices[0]

    def begin(seed):
        model = four_bit.stack(here).requires_grad_(False)
        torch.manual_seed(seed)
        model.append(torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES, device=here))
        return model, torch.optim.AdamW(model[-1].parameters(), lr=1e-2)

    def steps(model, optimizer):
        losses = []
        for _ in range(2):
            loss = model(four_bit.batch(here)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    source, optimizer = begin(1)
    steps(source, optimizer)
    of_model, of_optimizer = state_dict.get_state_dict(source, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    expected = steps(source, optimizer)

    model, optimizer = begin(2)
    of_model, of_optimizer = state_dict.get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    state_dict.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert steps(model, optimizer) == expected


def test_the_attributes_are_in_nobodys_way(gpu):
    here = gpu.devices[0]
    model = four_bit.stack(here, double_quant=True)
    names = list(model.state_dict())
    assert list(model.state_dict()) == names
    expected = four_bit.run(model, here)
    assert torch.equal(four_bit.run(copy.deepcopy(model), here), expected)
    assert torch.equal(four_bit.run(pickle.loads(pickle.dumps(model)), here), expected)
    assert torch.equal(four_bit.run(model.cpu().to(here), here), expected)
    assert list(model.state_dict()) == names
