"""The cases of the 8-bit patches say that all is right, on a device and without one."""

from __future__ import annotations

import importlib

import pytest

from diffusers_quantfix.fixes import INDEX
from diffusers_quantfix.verify.case import CannotReproduce
from tests.gate import unmet

IDS = [
    fix_id
    for fix_id in INDEX
    if "8bit" in fix_id or fix_id.startswith("bnb-int8") or fix_id == "bnb-linear4bit-conversion"
]
IDS.remove("diffusers-8bit-offload-detection")

modern = pytest.mark.skipif(bool(unmet("bitsandbytes>=0.45")), reason=unmet("bitsandbytes>=0.45"))


def say(fix_id, folder):
    case = importlib.import_module(f"diffusers_quantfix.verify.cases.{fix_id.replace('-', '_')}").case
    return case(str(folder))


@modern
@pytest.mark.parametrize("fix_id", IDS)
def test_on_a_device(gpu, tmp_path, fix_id):
    if fix_id == "diffusers-8bit-modular-gate" and unmet("diffusers>=0.35"):
        pytest.skip(unmet("diffusers>=0.35"))
    try:
        assert say(fix_id, tmp_path)
    except CannotReproduce as reason:
        assert str(reason).startswith("transformers: Using `bitsandbytes`")  # releases that refuse each other
        pytest.skip(str(reason))


@pytest.mark.parametrize("fix_id", IDS)
def test_without_a_device(tmp_path, fix_id):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    if fix_id == "diffusers-8bit-modular-gate" and unmet("diffusers>=0.35"):
        pytest.skip(unmet("diffusers>=0.35"))
    try:
        assert say(fix_id, tmp_path)
    except CannotReproduce as reason:
        assert "needs a CUDA device" in str(reason)
