"""Our probes start no thread of torch: a program that forks after its imports has what it has without us."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# OpenMP's threads do not survive a fork: where the parent has started them, the child's first parallel operator hangs.
PROGRAM = """
import os, threading
import diffusers_quantfix
import torch
import bitsandbytes, peft.tuners.lora.bnb, torch.distributed.fsdp
import diffusers.loaders.peft, diffusers.hooks, diffusers.quantizers.gguf.utils, diffusers.models.modeling_utils
from diffusers import FluxPipeline, FluxTransformer2DModel
threads = len(os.listdir("/proc/self/task"))
child = os.fork()
if not child:
    x = torch.randn(512, 512, requires_grad=True)
    (x @ x).sum().backward()

    def compute():
        (torch.randn(600, 600) @ torch.randn(600, 600)).sum()

    workers = [threading.Thread(target=compute) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os._exit(0)
print(threads, os.waitpid(child, 0)[1])
"""


@pytest.mark.long
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads as Linux does")
def test_no_thread_is_started():
    pytest.importorskip("diffusers", reason="the stack is not installed")
    pytest.importorskip("gguf")
    said = {}
    for setting in ("off", ""):
        environment = {
            **os.environ,
            "DIFFUSERS_QUANTFIX": setting,
            "OMP_NUM_THREADS": "2",
            "MKL_NUM_THREADS": "2",
        }
        said[setting] = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout.split()
    assert said[""] == said["off"]
    assert said[""][1] == "0"
