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


@shards
def test_files_that_would_be_preferred_are_gone(tmp_path, shard):
    """An earlier model in the folder, in one file or in several; what is not of accelerate stays."""
    folder = tmp_path / "model"
    save(training.layers("quanto-int8", seed=3), folder, max_shard_size=shard)
    (folder / "my-model.safetensors").write_bytes(b"mine")
    earlier = {file.name for file in folder.iterdir()}
    assert any(name.endswith("index.json") for name in earlier) == (shard != "10GB")
    model = training.layers("torchao-int8", seed=0).requires_grad_(False)
    save(model, str(folder), safe_serialization=True)
    assert {file.name for file in folder.iterdir()} == {"pytorch_model.bin", "my-model.safetensors"}
    assert_loads(folder, "torchao-int8", model)


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
