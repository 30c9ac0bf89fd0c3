"""Every case of `verify` reports success where its fix is applied or not needed, with a device and without one.

Without the package, on releases that have the defect, the script of ``explain ID --script`` shows it.
"""

from __future__ import annotations

import importlib
import re

import pytest

from diffusers_quantfix.commands.reproduction import script
from diffusers_quantfix.engine.versions import contains, installed_version
from diffusers_quantfix.fixes.targets import TARGETS
from diffusers_quantfix.verify.case import CannotReproduce
from diffusers_quantfix.verify.child import case_module, is_unable
from tests import rig
from tests.fixes import four_bit
from tests.fixes import quanto_models as q
from tests.gate import gate

# Why a case cannot be shown: what these releases or this machine lack.
LACKS = re.compile(
    "transformers: Using `bitsandbytes`|diffusers: |diffusers [0-9.]+ reads no GGUF files|needs gguf, which is not"
    "|shows with text encoders of transformers only|this diffusers has no (group offloading|hotswap)"
    "|no cache of this diffusers has a hook on"
    "|needs an NVIDIA GPU"
    "|needs a CPU with AVX512-BF16|needs a quantized component"
    "|needs (torchao or )?optimum-quanto|this bitsandbytes loads no kernels|bitsandbytes has loaded no native library"
    "|(this )?bitsandbytes does not quantize (on (a|this) CPU|here)"
    "|these releases load no LoRA into a GGUF model|this diffusers does not offload to disk here"
    "|this peft adds no OFT to such a layer|this torch cannot compile it"
    "|this diffusers loads (a LoRA into pipelines only|no LoRA into a 4-bit model)|needs torch >="
)
NO_DEVICE = re.compile("needs (a|two) CUDA device")
A_DEVICE = re.compile("this machine has a GPU")


def is_not_concerned(fix_id: str) -> str:
    """Why the situation of a fix is not there in these releases, as a sentence; empty where it is, fixed or not."""
    for name, specifier in TARGETS[fix_id].claims.items():
        version = installed_version(name)
        since = ",".join(part for part in specifier.split(",") if part.startswith(">"))
        if version is None or not contains(since, version):
            return f"needs {name}{since}: {version or 'nothing'} is installed"
    return ""


def show(fix_id: str, folder, cannot: re.Pattern[str]) -> None:
    case = importlib.import_module(case_module(fix_id)).case
    if reason := is_not_concerned(fix_id):
        pytest.skip(reason)
    if "quanto" in fix_id:
        q.quanto()
    try:
        with four_bit.skip_for_other_reasons():
            assert case(str(folder))
    except (ImportError, RuntimeError) as error:
        if not is_unable(error):
            raise
        pytest.skip(str(error))
    except CannotReproduce as reason:
        assert LACKS.match(str(reason)) or cannot.match(str(reason))
        pytest.skip(str(reason))


@pytest.mark.parametrize("fix_id", TARGETS)
def test_without_a_device(tmp_path, fix_id):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    show(fix_id, tmp_path, NO_DEVICE)


@pytest.mark.parametrize("fix_id", TARGETS)
def test_on_a_device(gpu, tmp_path, fix_id):
    show(fix_id, tmp_path, A_DEVICE)


# The first has no script, since its case takes the time limit of the fix itself down; the others end their process:
# the second is run by tests/tools/test_explain.py, the tests of the rest run in processes of their own.
APART = (
    "quanto-extension-lock",
    "quanto-int8-cpu-kernel",
    "bnb-cpu-zero-block",
    "quanto-share-memory",
    "torchao-share-memory",
)
# Whatever upstream raises, or an assertion with figures; not that something is missing in the script.
SHOWN = r"\A(?!NameError|UnboundLocalError(?!.*'rows')|ImportError|ModuleNotFoundError)"
SCRIPTS = [
    pytest.param(fix_id, marks=pytest.mark.defect(fix_id, shows=SHOWN))
    for fix_id in TARGETS
    if fix_id not in APART
]


@pytest.mark.parametrize("fix_id", SCRIPTS)
def test_the_script_shows_the_defect(request, side, tmp_path, fix_id):
    if side == "patched":
        pytest.skip("the script shows the defect, for which the package must be off")
    broken, why = gate(fix_id)
    if not broken:
        pytest.skip(why)
    if "quanto" in fix_id:
        q.quanto()
    rig.load()
    scope = {"__name__": "script"}
    exec(compile(script(fix_id), f"{fix_id}.py", "exec"), scope)
    try:
        run(scope["case"], tmp_path / "cpu")
    except Exception as error:
        if type(error).__name__ != "NeedsDevice":
            raise
        request.getfixturevalue("gpu")
        run(scope["case"], tmp_path / "gpu")


def run(case, folder) -> None:
    folder.mkdir()
    try:
        case(str(folder))
    except Exception as error:
        # transformers 5 takes no bitsandbytes as old as that of some sets
        too_old = isinstance(error, ImportError) and "requires bitsandbytes" in str(error)
        if type(error).__name__ == "CannotReproduce" or too_old:
            pytest.skip(str(error))
        raise
