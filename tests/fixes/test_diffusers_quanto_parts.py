"""diffusers-quanto-parts: diffusers loads a damaged checkpoint of quanto's weights without an error."""

from __future__ import annotations

import copy
import shutil

import pytest

from tests.fixes import quanto_models as q

FIX_ID = "diffusers-quanto-parts"
NEEDS = ("optimum-quanto>=0.2.6", "diffusers>=0.33.0")  # what diffusers itself asks for
SHOWS = "DID NOT RAISE"
PARTS = [
    ("int8", "_scale"),
    ("int8", "_data"),
    ("int4", "_scale"),
    ("int4", "_shift"),
    ("int4", "_data._data"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """weights -> folder of a model that was quantized and saved."""
    folder = q.saved_flux(tmp_path_factory.mktemp("flux"))
    found = {}
    for weights in ("int8", "int4"):
        found[weights] = tmp_path_factory.mktemp(weights)
        q.load_flux(folder, weights).save_pretrained(found[weights])
    return found


def changed(folder, place, change):
    """A copy of the checkpoint in ``folder`` with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, place)
    file = place / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, {"format": "pt"})
    return place


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
@pytest.mark.parametrize(("weights", "part"), PARTS)
@pytest.mark.parametrize("layer", ["x_embedder", "transformer_blocks.0.attn.to_q"])
def test_a_part_is_missing(saved, tmp_path, weights, part, layer):
    name = f"{layer}.weight.{part}"
    place = changed(saved[weights], tmp_path / "changed", lambda state: state.pop(name))
    with pytest.raises(ValueError, match=rf"the checkpoint has no {name}:"):
        q.load_flux(place, "")


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
@pytest.mark.parametrize(("weights", "part"), PARTS)
def test_another_shape(saved, tmp_path, weights, part):
    name = f"x_embedder.weight.{part}"

    def change(state):
        state[name] = state[name][:-1].contiguous()

    place = changed(saved[weights], tmp_path / "changed", change)
    with pytest.raises(ValueError, match=rf"{name} has the shape"):
        q.load_flux(place, "")


def test_a_sharded_checkpoint_is_loaded(saved, tmp_path):
    import torch

    model = q.load_flux(saved["int4"], "")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.iterdir())) > 3
    assert torch.equal(q.run_flux(q.load_flux(tmp_path, "")), q.run_flux(model))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_the_whole_weight_is_loaded(saved, tmp_path, weights, shape):
    """Weights that were not made by diffusers have it; quanto computes with it."""
    import torch

    name = "x_embedder.weight._scale"

    def change(state):
        state[name] = torch.full(shape, 0.5, dtype=state[name].dtype)

    place = changed(saved[weights], tmp_path / "changed", change)
    weight = q.load_flux(place, "").x_embedder.weight
    assert weight._scale.shape == shape and bool(weight._scale == 0.5)
    assert weight.dequantize().isfinite().all()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1, 1)])
def test_one_number_for_each_row_is_loaded(saved, tmp_path, weights, shape):
    import torch

    names = ("transformer_blocks.0.attn.to_q.weight._scale", "x_embedder.weight._scale")

    def change(state):
        for name in names:
            state[name] = state[name].reshape(shape)

    place = changed(saved[weights], tmp_path / "changed", change)
    assert torch.equal(q.run_flux(q.load_flux(place, "")), q.run_flux(q.load_flux(saved[weights], "")))


def test_a_scale_of_the_last_axis_is_loaded(saved, tmp_path):
    """quanto computes with it; one with another number of columns does not fit."""
    import torch

    layer = "transformer_blocks.0.ff.net.0.proj"
    rows, columns = q.load_flux(saved["int8"], "").get_submodule(layer).weight.shape
    assert rows != columns
    scale = torch.rand(1, columns, dtype=torch.float16)

    def change(state):
        state[f"{layer}.weight._scale"] = scale

    place = changed(saved["int8"], tmp_path / "changed", change)
    weight = q.load_flux(place, "").get_submodule(layer).weight
    assert torch.equal(weight.dequantize(), weight._data * scale)
    scale = scale[:, 1:].contiguous()
    place = changed(saved["int8"], tmp_path / "again", change)
    with pytest.raises(ValueError, match=rf"{layer}.weight._scale has the shape"):
        q.load_flux(place, "")


@pytest.mark.parametrize("gone", ["proj_out.", "proj_out.weight."])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_layer_of_which_there_is_nothing_may_be_replaced(saved, tmp_path, weights, gone):
    """It stays on meta, and diffusers names it as it does a plain layer; people put their own in its place."""
    import torch

    names = []

    def change(state):
        names.extend(name for name in state if name.startswith(gone))
        for name in names:
            del state[name]

    place = changed(saved[weights], tmp_path / "changed", change)
    whole = q.load_flux(saved[weights], "")
    model, info = q.load_flux(place, "", output_loading_info=True)
    assert model.proj_out.weight.device.type == "meta"
    parts = {name for name in names if ".weight." in name}
    assert parts and parts <= set(info["missing_keys"])
    assert not [name for name in info["missing_keys"] if name not in names]
    # Where its bias is there, torch computes with a weight on meta: numbers of nothing.
    with pytest.raises(RuntimeError, match="the checkpoint had no weight for this QLinear"):
        q.run_flux(model)
    if gone == "proj_out.weight.":
        given = copy.deepcopy(model)
        given.proj_out.weight = whole.proj_out.weight
        assert torch.equal(q.run_flux(given), q.run_flux(whole))
    model.proj_out = whole.proj_out
    assert torch.equal(q.run_flux(model), q.run_flux(whole))
