"""A file of ours that is truncated or cannot be read, as after an interrupted upgrade, costs fixes and no import."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import rest_is_long
from tests.trees import ROOT

PACKAGE = ROOT / "diffusers_quantfix"
FILES = [
    "__init__.py",
    "activation.py",
    "first_library.py",
    "forked.py",
    "user_settings.py",
    "process_runner.py",
    "surroundings.py",
    "fixes/__init__.py",
    "fixes/index.py",
    "fixes/transformers/quantized_resave.py",
    "engine/settings.py",
    "engine/interruptions.py",
    "engine/watcher.py",
    "engine/runner.py",
    "engine/decision.py",
    "engine/probe.py",
    "weights/wrappers.py",
]
START = ["__init__.py", "enabled.py", "choice"]
DAMAGES = ["truncated", "invalid", "empty", "folder"]

LIBRARY = {
    "transformers/__init__.py": "",
    "transformers/modeling_utils.py": "VALUE = 1\nclass PreTrainedModel: pass\n",
    "transformers-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformers\nVersion: 5.23.0\n",
}
PROGRAM = """
import {first}
import transformers, transformers.modeling_utils
import importlib
importlib.reload(transformers.modeling_utils)
print(transformers.modeling_utils.VALUE)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the package and its start-up files, as the wheel has them, and a library."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__", "startup", "*.md")
    shutil.copytree(PACKAGE, folder / "diffusers_quantfix", ignore=ignored)
    start = folder / "diffusers_quantfix_startup"
    start.mkdir()
    shutil.copy(PACKAGE / "startup" / "run.py", start / "__init__.py")
    shutil.copy(PACKAGE / "startup" / "enabled.py", start)
    (start / "choice").write_text("on")
    for name, text in LIBRARY.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    # Compiled once and not in each copy; what is damaged afterwards is older there than its source.
    assert compileall.compile_dir(folder, quiet=1)
    return folder


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 1] + b"\n(")
    elif how == "invalid":
        path.write_bytes(b"\xff\x00\xfe" + path.read_bytes())
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", rest_is_long(DAMAGES, "truncated", "invalid"))
@pytest.mark.parametrize("first", ["diffusers_quantfix", "diffusers_quantfix_startup"])
def test_an_import_of_a_library_works(site, first, how) -> None:
    files = [f"diffusers_quantfix/{name}" for name in FILES]
    if first == "diffusers_quantfix":
        files.remove("diffusers_quantfix/__init__.py")  # an import of the damaged file itself
    else:
        files += [f"{first}/{name}" for name in START if name != "__init__.py"]
    faults = []
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DIFFUSERS_"))}
    copies = [site.parent / f"{site.name}-{first}-{how}-{number}" for number in range(4)]
    for copy in copies:
        shutil.copytree(site, copy)
    for start in range(0, len(files), len(copies)):
        running = []
        for copy, name in zip(copies, files[start:], strict=False):
            damage(copy / name, how)
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(first=first)], cwd=copy, text=True,
                env=kept | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            running.append((name, copy, process))
        for name, copy, process in running:
            out, err = process.communicate(timeout=120)
            if (process.returncode, out) != (0, "1\n") or "Traceback" in err or len(err.splitlines()) > 4:
                faults.append(f"{name}: {process.returncode} {out} {err}")
            if (copy / name).is_dir():
                (copy / name).rmdir()
            shutil.copy2(site / name, copy / name)
    assert faults == []


@pytest.mark.parametrize("lines", rest_is_long(range(1, 16), 1, 4, 9))
def test_a_watcher_that_lost_its_last_lines(site, tmp_path, lines) -> None:
    """What is left is often valid Python, which fails in the middle of an import of a library."""
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    watcher = copy / "diffusers_quantfix" / "engine" / "watcher.py"
    watcher.write_text("\n".join(watcher.read_text().splitlines()[:-lines]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first="diffusers_quantfix")],
        env={"PYTHONPATH": str(copy)}, cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "no fixes applied" in done.stderr


def test_a_start_up_file_that_fails_after_it_has_run(site, tmp_path) -> None:
    """Each search for a library imported it again, which added a finder to the running search, without end."""
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    start = copy / "diffusers_quantfix_startup" / "__init__.py"
    start.write_text(start.read_text() + "\nimport there_is_no_such_module\n")
    first = "contextlib\nwith contextlib.suppress(ImportError): import diffusers_quantfix_startup"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env={"PYTHONPATH": str(copy)}, cwd=copy, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr  # Python's ``site`` may report the file


@pytest.mark.parametrize("how", ["truncated", "missing"])
@pytest.mark.parametrize("name", ["commands/explain.py", "advisories/symptoms.py"])
def test_a_command_says_what_to_do(site, tmp_path, name, how) -> None:
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    path = copy / "diffusers_quantfix" / name
    if how == "missing":
        path.unlink()
    else:
        damage(path, how)
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "explain", "Error: all on the same device"],
        env={"PYTHONPATH": str(copy)}, cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "install diffusers_quantfix again" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
