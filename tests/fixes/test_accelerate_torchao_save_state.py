"""accelerate-torchao-save-state: `Accelerator.save_state` fails for a model with weights of torchao."""

from __future__ import annotations

import pytest

from tests.fixes import training

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")

FIX_ID = "accelerate-torchao-save-state"
SHOWS = "Attempted to access the data pointer on an invalid python storage"


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("torchao>=0.15", "peft>=0.20"))
@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-float8"])
def test_a_training_is_resumed(tmp_path, kind):
    training.resume(kind, tmp_path / "state")


def test_the_file_that_would_be_preferred_is_gone(tmp_path):
    """``load_state`` reads safetensors first, and an earlier training may have left them in the folder."""
    plain = training.Training("quanto-int8", seed=3)
    plain.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").is_file()
    training.resume("torchao-int8", tmp_path / "state")
    assert not (tmp_path / "state" / "model.safetensors").exists()


def test_another_model_beside_it(tmp_path):
    """Two models of one accelerator, of which one is quantized."""
    import torch

    def prepared(seed):
        one = training.Training("torchao-int8", seed)
        torch.manual_seed(seed)
        return one, one.accelerator.prepare(torch.nn.Linear(4, 4))

    first, plain = prepared(0)
    first.accelerator.save_state(tmp_path / "state")
    other, loaded = prepared(1)
    other.accelerator.load_state(tmp_path / "state")
    assert torch.equal(loaded.weight, plain.weight)
    assert other.steps(0, 1) == first.steps(0, 1)


def test_plain_models_stay_in_safetensors(tmp_path):
    training.Training("quanto-int8", seed=3).accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").is_file()
    assert not (tmp_path / "state" / "pytorch_model.bin").exists()


def test_a_save_that_fails_changes_nothing(tmp_path, monkeypatch):
    one = training.Training("torchao-int8", seed=0)
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"as it was")

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    import torch

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            one.accelerator.save_state(folder)
    assert (folder / "model.safetensors").read_bytes() == b"as it was"
