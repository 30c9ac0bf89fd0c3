"""Time of the commands that people type."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from diffusers_quantfix.fixes.targets import TARGETS

from .figure import Row, figure
from .measure import ROOT, environment

# What `status` imports, without us.
IMPORTS = """
import importlib, json, sys
for module in json.loads(sys.argv[1]):
    try:
        importlib.import_module(module)
    except ImportError:
        pass
"""
PINS = "diffusers==0.33.1\ntransformers==4.51.3\naccelerate==1.6.0\nbitsandbytes==0.45.5\ntorch==2.7.0\n"


@figure("commands")
def commands() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        pins = Path(folder) / "requirements.txt"
        pins.write_text(PINS)
        for words, goal, runs in (
            (["check", str(pins)], 0.3, 11),
            (["status"], None, 3),
            (["doctor"], None, 3),
        ):
            taken = []
            for _ in range(runs):
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-m", "diffusers_quantfix", *words],
                    env=environment(), cwd=ROOT, capture_output=True, check=False,
                )  # fmt: skip
                taken.append(time.perf_counter() - began)
            yield Row(f"`{words[0]}`, wall time", statistics.median(taken), "s", goal, detail=f"{runs} runs")
        many = Path(folder) / "many.txt"
        many.write_text(
            "".join(f"package-{number}==1.{number % 50}  # why\n" for number in range(99_990)) + PINS
        )
        taken = [_processor_time("-m", "diffusers_quantfix", "check", str(many)) for _ in range(5)]
        yield Row("`check`, 100,000 lines, processor time", min(taken), "s", 1.0, detail="best of 5 runs")
    for words in (
        ["bnb-quant-state-meta"],
        ["NotImplementedError: Cannot copy out of meta tensor; no data!"],
    ):
        taken = [_processor_time("-m", "diffusers_quantfix", "explain", *words) for _ in range(7)]
        what = "an error text" if " " in words[0] else "ID"
        yield Row(f"`explain` {what}, processor time", statistics.median(taken), "s", 0.3, detail="7 runs")
    # In turns, and the best of each: other work on this machine slows both down.
    modules = list(dict.fromkeys(target.module for target in TARGETS.values()))
    pairs = [
        (
            _processor_time("-m", "diffusers_quantfix", "status"),
            _processor_time("-c", IMPORTS, json.dumps(modules)),
        )
        for _ in range(5)
    ]
    ratio = min(ours for ours, _ in pairs) / min(theirs for _, theirs in pairs)
    yield Row(
        "`status` / importing the same libraries", ratio, "x", 1.10, detail="processor time, 5 runs each"
    )


def _processor_time(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], env=environment(), cwd=ROOT, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
