"""A training with LoRAs on a quantized model that was saved by `Accelerator.save_state` is resumed bit by bit."""

from __future__ import annotations

import pytest

from tests.fixes import training
from tests.gate import unmet

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch.save"])
@pytest.mark.parametrize("kind", training.KINDS)
def test_every_kind(tmp_path, kind, safe):
    if kind.startswith(("nf4", "int8")) and (sentence := unmet("bitsandbytes>=0.46")):
        pytest.skip(f"bitsandbytes quantizes on a CPU from 0.46 on; {sentence}")
    if kind.startswith("torchao") and (sentence := unmet("torchao>=0.15")):
        pytest.skip(sentence)
    training.resume(kind, tmp_path / "state", safe_serialization=safe)
