"""diffusers-quanto-reload: a saved model with weights of quanto is on meta after loading."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import without_index as without_index

FIX_ID = "diffusers-quanto-reload"
NEEDS = ("optimum-quanto>=0.2.6", "diffusers>=0.33.0")  # what diffusers itself asks for
SHOWS = r"is not on the expected device meta|cannot be called on meta tensors|the model is on meta"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """weights -> (folder of a model that was quantized and saved, what it gave)."""
    folder = q.saved_flux(tmp_path_factory.mktemp("flux"))
    found = {}
    for weights in ("float8", "int4"):
        model = q.load_flux(folder, weights)
        place = tmp_path_factory.mktemp(weights)
        model.save_pretrained(place)
        found[weights] = place, q.run_flux(model)
    return found


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
@pytest.mark.parametrize("weights", ["float8", "int4"])
def test_a_saved_model_runs_where_it_was_loaded(saved, weights):
    import torch

    folder, reference = saved[weights]
    model = q.load_flux(folder, "")
    assert not any(layer.weight.is_meta for layer in model.modules() if type(layer).__name__ == "QLinear"), (
        "the model is on meta"
    )
    assert model.device == torch.device("cpu")
    assert torch.equal(q.run_flux(model), reference)


@pytest.mark.defect(FIX_ID, shows=r"KeyError: 'x_embedder.weight'|missing \d required", needs=NEEDS)
def test_a_saved_model_is_offloaded_sequentially(saved):
    import torch
    from accelerate import cpu_offload

    folder, reference = saved["int4"]
    model = cpu_offload(q.load_flux(folder, ""), torch.device("cpu"))
    assert torch.equal(q.run_flux(model), reference)


@pytest.mark.usefixtures("without_index")
def test_sequential_offload_without_an_index_interrupted_and_in_inference_mode(saved, gpu):
    import torch
    from accelerate import cpu_offload

    if q.unsupported():
        pytest.skip(q.unsupported())
    device, folder = gpu.devices[0], saved["int4"][0]
    reference = q.run_flux(q.load_flux(folder, "").to(device), device)
    model = cpu_offload(q.load_flux(folder, ""), spelled(device))

    def check(latents):
        assert torch.equal(latents, reference)

    assert_goes_on(lambda: q.run_flux(model, device), check)


def test_a_saved_model_is_loaded_onto_a_gpu(saved, gpu):
    if q.unsupported():
        pytest.skip(q.unsupported())
    device = gpu.devices[0]
    folder, reference = saved["float8"]
    model = q.load_flux(folder, "").to(device)
    assert model.x_embedder.weight.device == device == model.x_embedder.weight._data.device
    assert q.error(q.run_flux(model, device), reference) < 0.01
