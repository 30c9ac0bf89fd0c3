"""A function of torch that a program imports by name before any library is the patched one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diffusers_quantfix import _WAITED_FOR

ROOT = Path(__file__).resolve().parents[2]
# As `site` does it, with the module that the wheel calls diffusers_quantfix_startup
BY_START_UP = """
import importlib.util
import sys
folder = "diffusers_quantfix/startup"
spec = importlib.util.spec_from_file_location(
    "diffusers_quantfix_startup", f"{folder}/run.py", submodule_search_locations=[folder]
)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
"""
PROGRAM = """
import sys
import torch
woken = "diffusers_quantfix.activation" in sys.modules
early = [name for name in {names!r} if name in sys.modules]
from torch.distributed.fsdp import FullyShardedDataParallel as first
from torch.distributed import fsdp
shard = getattr(fsdp, "fully_shard", None)
import accelerate
import diffusers_quantfix
answers = diffusers_quantfix.status(load=False)
waits = [fix for fix in ("torch-fully-shard-8bit", "torch-sharded-loaded-4bit") if answers[fix].state == "waiting"]
print(woken, early, waits, fsdp.FullyShardedDataParallel is first, getattr(fsdp, "fully_shard", None) is shard)
"""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("import diffusers_quantfix", id="import", marks=pytest.mark.long),
        pytest.param(BY_START_UP, id="start-up file"),
    ],
)
def test_a_function_that_was_imported_by_name(monkeypatch, start) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("DIFFUSERS_QUANTFIX_AUTO", "1")
    monkeypatch.delenv("DIFFUSERS_QUANTFIX", raising=False)
    program = start + PROGRAM.format(names=sorted(name for name in _WAITED_FOR if name.startswith("torch.")))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False [] [] True True", done.stdout + done.stderr
