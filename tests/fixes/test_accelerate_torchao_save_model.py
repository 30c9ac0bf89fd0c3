"""accelerate-torchao-save-model: `Accelerator.save_model` fails for a model with weights of torchao."""

from __future__ import annotations

import pytest

from tests.fixes import training
from tests.fixes.merged import assert_same, bits
from tests.gate import unmet

pytest.importorskip("torchao", reason="torchao is not installed")

FIX_ID = "accelerate-torchao-save-model"
SHOWS = "Attempted to access the data pointer on an invalid python storage"
KINDS = ("torchao-int8", "torchao-float8", "torchao-int4")
SHARDS = ("10GB", "8KB")
kinds = pytest.mark.parametrize("kind", KINDS)
shards = pytest.mark.parametrize("shard", SHARDS)


def save(model, folder, **options) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).save_model(model, folder, **options)


def assert_loads(folder, kind: str, model) -> None:
    """Each way of accelerate gives the bits of ``model`` to another one."""
    from accelerate import load_checkpoint_and_dispatch, load_checkpoint_in_model

    for device_map in (None, {"": "cpu"}):
        if device_map and unmet("accelerate>=1.14"):
            continue  # it cannot place these weights one by one
        for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
            other = training.layers(kind, seed=5).requires_grad_(False)
            load(other, folder, device_map=device_map)
            assert_same(bits(other), bits(model))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torchao>=0.15")
@shards
@kinds
def test_what_is_saved_is_loaded(tmp_path, kind, shard):
    model = training.layers(kind, seed=0).requires_grad_(False)
    save(model, tmp_path / "model", max_shard_size=shard)
    assert_loads(tmp_path / "model", kind, model)


@pytest.mark.parametrize("earlier", ["quanto-int8", "torchao-int8"])
@pytest.mark.parametrize("shard_before", SHARDS)
@shards
def test_an_earlier_model_in_the_folder(tmp_path, earlier, shard_before, shard):
    """What is saved is what is loaded. Shards stay, which no file names then: a base model may be among them."""
    folder = tmp_path / "model"
    save(training.layers(earlier, seed=3).requires_grad_(False), folder, max_shard_size=shard_before)
    (folder / "my-model.safetensors").write_bytes(b"mine")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model = training.layers("torchao-int8", seed=0).requires_grad_(False)
    save(model, str(folder), safe_serialization=True, max_shard_size=shard)
    assert_loads(folder, "torchao-int8", model)
    gone = {name for name in before if not (folder / name).exists()}
    gone -= {name for name in gone if name.startswith("pytorch_model-")}  # accelerate removes those itself
    if shard == "10GB":
        assert gone <= {"model.safetensors"}
    else:
        assert {name for name in gone if "-of-" not in name} <= {
            "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
        }  # fmt: skip
        assert not any(name.endswith(".safetensors") and "-of-" in name for name in gone)
    assert (folder / "my-model.safetensors").read_bytes() == b"mine"


def test_nothing_is_left_at_the_accelerator(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    before = dict(vars(accelerator))
    accelerator.save_model(training.layers("torchao-int8", seed=0), tmp_path)
    assert vars(accelerator) == before


def test_others_stay_in_safetensors(tmp_path):
    save(training.layers("quanto-int8", seed=3), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_save_that_fails_changes_nothing(tmp_path, monkeypatch):
    import torch

    (tmp_path / "model.safetensors").write_bytes(b"as it was")

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            save(training.layers("torchao-int8", seed=0), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"as it was"
