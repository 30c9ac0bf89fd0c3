"""torch-checkpoint-names-cache: ``torch.distributed.checkpoint`` keeps every model that it has saved."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.fixes import four_bit
from tests.fixes.distributed_state import state_dict as state_dict

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")  # torch alone does not activate the package

FIX_ID = "torch-checkpoint-names-cache"
SHOWS = "the model is still there"


def assert_freed(reference) -> None:
    gc.collect()
    assert reference() is None, "the model is still there"


def plain():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_was_saved_is_freed(state_dict):
    model = plain()
    assert state_dict.get_model_state_dict(model).keys() == model.state_dict().keys()
    reference = weakref.ref(model)
    del model
    assert_freed(reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_run_that_is_saved_and_resumed(state_dict):
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = state_dict.get_state_dict(model, optimizer)
    state_dict.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    reference = weakref.ref(model)
    del model, optimizer, of_model, of_optimizer
    assert_freed(reference)


def test_the_bytes_of_a_quantized_model(gpu, state_dict):
    here = gpu.devices[0]
    before = gpu.allocated(here)
    model = four_bit.stack(here)
    state_dict.get_model_state_dict(model)
    assert gpu.allocated(here) > before
    del model
    gc.collect()
    assert gpu.allocated(here) == before
