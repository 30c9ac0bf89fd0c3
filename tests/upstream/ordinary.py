"""``python -m tests.upstream.ordinary``: no fix fails to be installed in programs as people write them.

Whatever else runs on a release set has imported all libraries first. A program imports what it uses, and a probe is
asked when its target is there, which may be before another module that it reads.
"""

from __future__ import annotations

import subprocess
import sys

from diffusers_quantfix.engine.board import FAILED

# One statement a line; what this release set lacks is passed over.
PROGRAMS = {
    "a pipeline": ["from diffusers import FluxPipeline", "from diffusers import StableDiffusionPipeline"],
    "a quantized model": [
        "from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CLIPTextModel",
        "from diffusers import FluxTransformer2DModel, StableDiffusionPipeline",
        "from diffusers import BitsAndBytesConfig, GGUFQuantizationConfig, QuantoConfig, TorchAoConfig",
    ],
    "adapters": [
        "import peft",
        "from diffusers import AutoencoderKL, StableDiffusionXLPipeline, HunyuanDiTPipeline",
    ],
    "quantizers first": [
        "import bitsandbytes",
        "import optimum.quanto",
        "import torchao",
        "import gguf, accelerate",
    ],
}
_RUN = """
import sys
import diffusers_quantfix
for statement in sys.argv[1:]:
    try:
        exec(statement)
    except (ImportError, RuntimeError):
        pass
for answer in diffusers_quantfix.status():
    for one in answer.targets or [answer]:
        print(one.state, one.id, one.reason, sep="|")
"""


def failures(python: str = sys.executable) -> list[str]:
    """What the board calls failed, after each program."""
    running = {
        name: subprocess.Popen(
            [python, "-c", _RUN, *statements], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name, statements in PROGRAMS.items()
    }
    found = []
    for name, process in running.items():
        out, err = process.communicate(timeout=600)
        rows = [line.split("|") for line in out.splitlines() if line.count("|") >= 2]
        if process.returncode or len(rows) < 100:
            found.append(f"{name}: {process.returncode}, {len(rows)} answers, {err[-500:]}")
        found += [f"{name}: {fix}: {reason}" for state, fix, reason, *_ in rows if state == FAILED]
    return found


if __name__ == "__main__":
    faults = failures()
    print(*faults, sep="\n")
    sys.exit(bool(faults))
