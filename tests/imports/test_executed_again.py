"""Libraries that are executed a second time in one process have every fix again, and the board tells the truth."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, json, logging, signal, sys, warnings
warnings.simplefilter("ignore")
import diffusers_quantfix
import accelerate, bitsandbytes, torch, transformers

TARGET = "diffusers.pipelines.pipeline_utils"

def interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_name == "broken" and code.co_filename.endswith("sequential_guard.py"):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
    sys.settrace(trace)
    try:
        importlib.import_module(TARGET)
    except KeyboardInterrupt:
        return
    raise SystemExit("it was not interrupted")

def deleted():
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        del sys.modules[name]

def reloaded():
    importlib.reload(sys.modules[TARGET])
    importlib.reload(sys.modules["diffusers.quantizers.bitsandbytes.bnb_quantizer"])

def use():
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
    pipelines = importlib.import_module(TARGET)
    quantizer = importlib.import_module("diffusers.quantizers.bitsandbytes.bnb_quantizer")
    return {
        "pipeline": ours(pipelines.DiffusionPipeline.to),
        "quantizer": ours(quantizer.BnB4BitDiffusersQuantizer.validate_environment),
    }

def ours(function):
    found = []
    while function is not None:
        found.append(function.__code__.co_filename.replace("\\\\", "/").rpartition("diffusers_quantfix/")[2])
        function = getattr(function, "__wrapped__", None)
    return found[:-1]

def told():
    code = use()
    board = diffusers_quantfix.status(load=False)
    return {"code": code, "states": {fix.id: fix.state for fix in board}}

if sys.argv[1] == "interrupted":
    interrupted()
elif sys.argv[1] != "once":
    told()
    globals()[sys.argv[1]]()
print(json.dumps(told()))
importlib.reload(importlib.import_module("diffusers.models.modeling_utils"))
"""


@pytest.fixture(scope="module")
def once():
    return run("once")


def run(how: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "has been loaded with" not in done.stderr, "a probe has logged through diffusers"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("how", ["interrupted", "deleted", "reloaded"])
def test_executed_again(once, how) -> None:
    for library in ("diffusers.hooks", "bitsandbytes", "accelerate"):
        pytest.importorskip(library, reason="the stack is not installed")
    assert len(once["code"]["pipeline"]) > 2
    assert run(how) == once
