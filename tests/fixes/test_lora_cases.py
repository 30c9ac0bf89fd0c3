"""The cases of the patches for LoRA and adapters say that all is right, on a device and without one."""

from __future__ import annotations

import importlib

import pytest

from diffusers_quantfix.verify.case import CannotReproduce
from tests.fixes import four_bit
from tests.gate import unmet

pytest.importorskip("peft", reason="peft is not installed")

IDS = (
    "diffusers-control-lora-reset",
    "diffusers-fuse-lora-offloaded",
    "diffusers-fuse-model-lora-offloaded",
    "diffusers-ip-adapter-quantized",
    "diffusers-lora-offload-flip",
    "diffusers-sequential-guard",
    "diffusers-text-encoder-lora-quantized",
    "diffusers-textual-inversion-offload-flip",
)
ON_A_DEVICE = ("diffusers-ip-adapter-quantized", "diffusers-text-encoder-lora-quantized")


@pytest.mark.parametrize("fix_id", IDS)
def test_without_a_device(tmp_path, fix_id):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    said(fix_id, tmp_path)


@pytest.mark.parametrize("fix_id", ON_A_DEVICE)
def test_on_a_device(gpu, tmp_path, fix_id):
    said(fix_id, tmp_path)


def said(fix_id, folder):
    if fix_id == "diffusers-control-lora-reset" and unmet("diffusers>=0.32.2"):
        pytest.skip(unmet("diffusers>=0.32.2"))
    case = importlib.import_module(f"diffusers_quantfix.verify.cases.{fix_id.replace('-', '_')}").case
    try:
        with four_bit.skip_for_other_reasons():
            assert case(str(folder))
    except CannotReproduce as reason:
        assert "needs a CUDA device" in str(reason)
