"""pip and uv, editable and for one user: chosen, active, and gone without a trace."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.startup.conftest import ROOT, Bench, Environment, checked
from tests.startup.test_start import ASK, active


def left_in(*folders: pathlib.Path) -> list[str]:
    return [str(path) for folder in folders for path in folder.rglob("*quantfix*")]


def proved(environment: Environment) -> None:
    """What every way of installing has to give."""
    assert not active(environment), "inert until chosen"
    assert active(environment, DIFFUSERS_QUANTFIX_AUTO="1")
    checked(environment.run("-m", "diffusers_quantfix", "enable"))
    assert active(environment)
    checked(environment.run("-m", "diffusers_quantfix", "disable"))
    assert not active(environment)
    checked(environment.run("-m", "diffusers_quantfix", "enable"))  # and so it is removed


def empty_environment(folder: pathlib.Path, *lent: str) -> Environment:
    made = Environment(folder / "environment")
    command = [sys.executable, "-m", "venv", "--without-pip", str(made.folder)]
    checked(subprocess.run(command, capture_output=True, text=True, check=False))
    made.adopt("wrapt", "packaging", *lent)
    return made


def test_uv(wheel: pathlib.Path, tmp_path: pathlib.Path):
    uv = shutil.which("uv") or str(pathlib.Path(sys.executable).with_name("uv"))
    if not pathlib.Path(uv).exists():
        pytest.skip("uv is not installed")
    environment, other = empty_environment(tmp_path), empty_environment(tmp_path / "other")

    def run_uv(environment: Environment, *arguments: object) -> None:
        command = [
            uv,
            "pip",
            *arguments,
            "-p",
            environment.python,
            "--offline",
            "-q",
            "--cache-dir",
            tmp_path / "cache",
        ]
        checked(subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False))

    for each in (environment, other):
        run_uv(each, "install", "--no-index", "--no-deps", wheel)
    proved(environment)
    assert not active(other), "uv links the files of both to its cache"
    run_uv(environment, "install", "--no-index", "--no-deps", "--reinstall", wheel)
    assert not active(environment), "run `enable` again after an upgrade"
    proved(environment)
    run_uv(environment, "uninstall", "diffusers-quantfix")
    assert left_in(environment.site, environment.folder / "bin") == []
    assert environment.run("-c", "pass").stderr == ""


@pytest.mark.long
def test_an_editable_install(tmp_path: pathlib.Path):
    for name in ("hatchling", "editables"):
        pytest.importorskip(name, reason="cannot build an editable wheel without it")
    tools = ("hatchling", "pathspec", "pluggy", "trove_classifiers", "editables")
    environment = empty_environment(tmp_path, *tools)
    install = ("install", "--no-index", "--no-deps", "--no-build-isolation", "-e", ROOT)
    checked(environment.pip(*install))
    proved(environment)
    where = checked(environment.run("-c", "import diffusers_quantfix as q; print(q.__file__)"))
    assert where.stdout.strip() == str(ROOT / "diffusers_quantfix" / "__init__.py")
    checked(environment.pip("uninstall", "-y", "diffusers-quantfix"))
    assert left_in(environment.site, environment.folder / "bin") == []


@pytest.mark.long
def test_an_install_for_one_user(wheel: pathlib.Path, tmp_path: pathlib.Path):
    bench = Bench()
    if checked_or_none(bench.run("-m", "pip", "--version")) is None:
        pytest.skip(f"{bench.python} has no pip")
    home = {"PYTHONUSERBASE": str(tmp_path), "HOME": str(tmp_path), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    checked(bench.run("-m", "pip", "install", "-q", "--user", "--no-index", "--no-deps", wheel, **home))

    def is_active(**variables: str) -> bool:
        return checked(bench.run("-c", ASK, **home, **variables)).stdout.strip() == "True"

    assert not is_active()
    assert is_active(DIFFUSERS_QUANTFIX_AUTO="1")
    said = checked(bench.run("-m", "diffusers_quantfix", "enable", **home)).stdout
    assert f"at every start of the Python programs that use {tmp_path}" in said
    assert is_active()
    done = bench.run("-s", "-c", ASK, **home)
    assert done.stdout.strip() == "False", "python -s has no packages of the user"
    checked(bench.run("-m", "pip", "uninstall", "-q", "-y", "diffusers-quantfix", **home))
    assert left_in(tmp_path) == []


def checked_or_none(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str] | None:
    return done if done.returncode == 0 else None
