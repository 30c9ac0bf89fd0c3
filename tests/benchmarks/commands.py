"""Wall time of the commands that people type."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .figure import Row, figure
from .measure import ROOT, environment

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
