"""A program gets no module of another library that it would not have without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.marks import rest_is_long

# Program -> the library that it needs
PROGRAMS = {
    "import accelerate": "accelerate",
    "import bitsandbytes": "bitsandbytes",
    "import diffusers.hooks": "diffusers",
    "import optimum.quanto": "optimum",
    "import peft": "peft",
    "import torch, gguf, safetensors.torch": "gguf",
    "import torch.distributed.fsdp": "torch",
    "import torchao.quantization": "torchao",
    "import transformers.modeling_utils": "transformers",
    "import bitsandbytes; from diffusers import FluxPipeline": "diffusers",
}
OFTEN = ("import bitsandbytes; from diffusers import FluxPipeline",)
# Ours, what we require, and Python's own.
OURS = {"diffusers_quantfix", "packaging", "wrapt", *sys.stdlib_module_names}


def modules(program: str) -> set[str]:
    """The modules that a new process has after a program."""
    environment = {name: value for name, value in os.environ.items() if name != "DIFFUSERS_QUANTFIX"}
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport json, sys; print(json.dumps([*map(str, sys.modules)]))"],
        env={**environment, "DIFFUSERS_QUANTFIX_AUTO": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("program", rest_is_long(PROGRAMS, *OFTEN))
def test_an_import(program) -> None:
    if find_spec(PROGRAMS[program]) is None:
        pytest.skip(f"{PROGRAMS[program]} is not installed")
    bare = modules(program)
    patched = modules(f"import diffusers_quantfix\n{program}")
    more = {name for name in patched - bare if name.partition(".")[0] not in OURS}
    assert (more, bare - patched) == (set(), set())


def test_nothing_more_for_a_program_without_quantized_models() -> None:
    """Of ours neither."""
    program = "import json, logging, decimal"
    assert modules(f"import diffusers_quantfix\n{program}") - modules(program) == {"diffusers_quantfix"}


def test_code_is_read_without_an_import() -> None:
    program = """
from diffusers_quantfix.engine.errors import TargetMissing
from diffusers_quantfix.engine.probe import names_in, unimported_code
import sys, xml.etree
assert "_root" in names_in(unimported_code("xml.etree.ElementTree", "ElementTree.iter"))
for missing in (("xml.etree.None_", "f"), ("xml.etree.ElementTree", "ElementTree.none"), ("time", "sleep")):
    try:
        unimported_code(*missing)
    except TargetMissing:
        continue
    raise AssertionError(missing)
"""
    assert "xml.etree.ElementTree" not in modules(program)
