"""What is pickled, copied and inspected behaves as without the package, except where `MEANT` says why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from diffusers_quantfix.process_runner import RUNNER
from tests.slots.describe import IMPORTED

ROOT = Path(__file__).resolve().parents[2]
SAME = ("the same object", "an equal object")
# A class of ours, of which no pickle holds an instance.
_OURS = ("torchao.quantization.quant_api.partial", "torchao.prototype.mx_formats.inference_workflow.partial")
_FLAG = "._supports_group_offloading"
Answers = dict[str, str]


def the_code_is_ours(slot: str, asked: str, bare: Answers) -> bool:
    """Tracebacks and debuggers have to show the file in which it is; ``inspect.getsource`` shows upstream's."""
    return asked.endswith("/file/0")


def wrappers_take_any_argument(slot: str, asked: str, bare: Answers) -> bool:
    """``inspect.signature`` follows ``__wrapped__``; ``getfullargspec`` and ``__defaults__`` do not."""
    return "/argspec" in asked or "/defaults" in asked


def named_after_its_owner(slot: str, asked: str, bare: Answers) -> bool:
    """An inherited or imported function that is patched for one owner is that owner's, and pickled by that name."""
    names = [bare.get(f"/value/names/{name}", "") for name in ("__module__", "__qualname__")]
    of_a_class = any(question.startswith("/kind") for question in bare)
    if slot.endswith(f".{names[1]}") if of_a_class else slot == ".".join(names):
        return False
    of_the_name = {"/own", "/kind/1", "/value/module", "/value/repr"}
    of_the_name |= {f"/value/names/{name}" for name in ("__qualname__", "__module__")}
    return asked in of_the_name | {f"/value/pickled/{protocol}" for protocol in range(6)}


def was_written_in_c(slot: str, asked: str, bare: Answers) -> bool:
    """``Params4bit.__setattr__`` is that of object: a function of Python takes its place."""
    return bare["/raw"] == "builtins.wrapper_descriptor"


def torchao_module_pickle(slot: str, asked: str, bare: Answers) -> bool:
    """The fix renames what torchao makes methods of, so that pickle finds them."""
    name = slot.rpartition(".")[2]
    if name in ("_linear_extra_repr", "_embedding_extra_repr"):
        return asked == "/value/names/__name__"
    return slot in _OURS


def torch_checkpoint_names_cache(slot: str, asked: str, bare: Answers) -> bool:
    """The fix removes the cache, which keeps models alive."""
    return slot.endswith(".state_dict._get_fqns")


def torch_compiler_disable(slot: str, asked: str, bare: Answers) -> bool:
    """Torch leaves attributes at what it does not compile, and there a fix knows its own function by one of ours."""
    ours = (".group_offloading.ModuleGroup.", ".group_offloading.GroupOffloadingHook.")
    return any(name in slot for name in ours) and asked == "/value/attributes"


def is_a_flag(slot: str, asked: str, bare: Answers) -> bool:
    """The fix is that a flag of the class is True."""
    return slot.endswith(_FLAG)


def is_wrapped_by_wrapt(slot: str, asked: str, bare: Answers) -> bool:
    """A function of the loading path: its wrapper answers as the function does, but for what it is itself."""
    return asked in ("/raw", "/value/type") and slot.rpartition(".")[2] in WRAPPED_BY_WRAPT


WRAPPED_BY_WRAPT = (
    "_assign_components_to_devices",
    "_get_final_device_map",
    "_load_empty_model",
    "hotswap_adapter_from_state_dict",
)

MEANT: list[Callable[[str, str, Answers], bool]] = [
    the_code_is_ours,
    wrappers_take_any_argument,
    named_after_its_owner,
    was_written_in_c,
    torchao_module_pickle,
    torch_checkpoint_names_cache,
    torch_compiler_disable,
    is_a_flag,
    is_wrapped_by_wrapt,
]


class Side(NamedTuple):
    """One process, with the package or without it.

    Attributes:
        slots: what is seen of every patched slot: slot -> question -> answer.
        product: the bits of a product, with a setting of MKL's that the program makes after its imports.
        borrowed: which top-level packages have modules with functions of which others.
        said: what was written to standard output and error during all imports, numbers aside.
    """

    slots: dict[str, Answers]
    product: str
    borrowed: list[list[str]]
    said: list[str]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    """Without the package and with it."""
    pytest.importorskip("diffusers", reason="the stack is not installed")
    folder = tmp_path_factory.mktemp("slots")
    patched, bare = folder / "patched.json", folder / "bare.json"
    said = []
    for arguments in (["patched", patched], ["bare", bare, patched]):
        command = [sys.executable, "-W", "always", "-m", "tests.slots.describe", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        streams = [stream.partition(IMPORTED) for stream in (done.stdout, done.stderr)]
        assert all(imported for _, imported, _ in streams)
        said.append(
            [re.sub(r"[\d:.]+", "", line) for before, _, _ in streams for line in before.splitlines()]
        )
    return Side(*_read(bare), said[1]), Side(*_read(patched), said[0])


def _read(report: Path) -> tuple[dict[str, Answers], str, list[list[str]]]:
    written = json.loads(report.read_text(encoding="utf-8"))
    slots = {slot: dict(_flat(found)) for slot, found in written["slots"].items()}
    return slots, written["product"], written["borrowed"]


def _flat(found: Any, asked: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(found, str):
        yield asked, found
        return
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield from _flat(value, f"{asked}/{key}")


@pytest.mark.thorough
def test_every_slot_is_seen_as_without_the_package(sides):
    bare, patched = (side.slots for side in sides)
    assert len(bare) > 100
    differences = []
    for slot, answers in bare.items():
        for asked in sorted(answers.keys() | patched[slot].keys()):
            before, after = answers.get(asked), patched[slot].get(asked)
            if asked.startswith("/loaded/") or before == after:
                continue
            if not any(is_meant(slot, asked, answers) for is_meant in MEANT):
                differences.append(f"{slot} {asked}: {before!r} without the package, {after!r} with it")
    assert not differences, f"{len(differences)} differences\n" + "\n".join(differences[:40])


@pytest.mark.thorough
def test_what_is_pickled_with_the_package_loads_without_it(sides):
    bare = sides[0].slots
    loaded = 0
    for slot, answers in bare.items():
        for protocol in range(6):
            if (
                answers.get(f"/value/unpickled/{protocol}") in SAME
                and slot not in _OURS
                and not slot.endswith(_FLAG)
            ):
                assert answers[f"/loaded/{protocol}"] in SAME, slot
                loaded += 1
    assert loaded > 500


@pytest.mark.thorough
def test_the_probes_and_patches_log_and_warn_of_nothing(sides):
    bare, patched = (side.said for side in sides)
    assert [line for line in patched if line not in bare] == []


@pytest.mark.thorough
def test_what_the_program_sets_after_its_imports_is_in_force(sides):
    """MKL reads its settings at the first product, sine or exponential, also of a probe's."""
    bare, patched = (side.product for side in sides)
    assert patched == bare


@pytest.mark.thorough
def test_copies_are_searched_for_wherever_a_library_may_have_them(sides):
    ledger = RUNNER._ledger
    pairs = [(holder, home) for holder, home in sides[0].borrowed if {holder, home} <= ledger._libraries]
    assert ("diffusers", "transformers") in pairs
    for holder, home in pairs:
        assert holder in ledger.holders([home])
