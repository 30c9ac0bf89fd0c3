"""Installed without sources or without metadata, as packagers of programs do, every fix is applied."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.startup.conftest import Environment, _made, checked


@pytest.fixture
def without_sources(
    wheel: pathlib.Path, stack_environment: Environment, tmp_path: pathlib.Path
) -> Environment:
    """The stack's environment once more, with the package compiled elsewhere and its sources deleted."""
    made = _made(wheel, tmp_path)
    (made.site / "a_stack.pth").write_text((stack_environment.site / "a_stack.pth").read_text())
    package = made.site / "diffusers_quantfix"
    compiled = [sys.executable, "-m", "compileall", "-q", "-b", "-s", made.site, "-p", "/elsewhere", package]
    checked(subprocess.run([str(part) for part in compiled], capture_output=True, text=True, check=False))
    for source in package.rglob("*.py"):
        source.unlink()
    return made


def _answers(environment: Environment) -> dict[str, tuple[str, str, list[str]]]:
    done = checked(environment.run("-m", "diffusers_quantfix", "status", "--json", HF_HUB_OFFLINE="1"))
    fixes = json.loads(done.stdout)["fixes"]
    return {fix["id"]: (fix["state"], fix["reason"], fix["changes"]) for fix in fixes}


@pytest.mark.long
def test_the_board_is_the_same(stack_environment: Environment, without_sources: Environment):
    there = checked(without_sources.run("-c", "import diffusers_quantfix as q; print(q.__file__)")).stdout
    assert there.strip().endswith("__init__.pyc")
    expected = _answers(stack_environment)
    assert sum(state == "applied" for state, _, _ in expected.values()) > 50
    assert _answers(without_sources) == expected


WITHOUT_METADATA = """
import importlib.metadata, json, sys

real = importlib.metadata.version
NAMES = "torch diffusers transformers accelerate bitsandbytes optimum-quanto gguf torchao peft".split()

def version(name):
    asking = sys._getframe(1).f_globals["__name__"]
    if name in NAMES and asking.startswith("diffusers_quantfix"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version  # the libraries ask for it, too, and are to be as they are
import diffusers_quantfix, diffusers
print(json.dumps(diffusers_quantfix.status().to_dict()))
"""


@pytest.mark.thorough
@pytest.mark.long
def test_the_board_is_the_same_without_metadata(stack_environment: Environment):
    """Vendored, frozen, or built by Bazel."""
    done = checked(stack_environment.run("-c", WITHOUT_METADATA, HF_HUB_OFFLINE="1"))
    found = {fix["id"]: (fix["state"], fix["changes"]) for fix in json.loads(done.stdout)["fixes"]}
    assert found == {
        name: (state, changes) for name, (state, _, changes) in _answers(stack_environment).items()
    }
