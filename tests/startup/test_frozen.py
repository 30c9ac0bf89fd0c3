"""Frozen by PyInstaller a program has the fixes that it has when it is not frozen, and no library more."""

from __future__ import annotations

import ast
import configparser
import json
import pathlib
import runpy
import subprocess
import sys
import types
import zipfile

import pytest

from tests.startup.conftest import ROOT, Environment, checked

PACKAGE = ROOT / "diffusers_quantfix"
HOOK = PACKAGE / "startup" / "freezing" / "hook-diffusers_quantfix.py"

PROGRAM = """
import json, sys
import diffusers_quantfix
IMPORTS
board = diffusers_quantfix.status(load=False)
answers = {fix.id: (fix.state, fix.reason) for fix in board if fix.module in sys.modules}
print(json.dumps({"frozen": getattr(sys, "frozen", False), "answers": answers}))
"""
# A library that has nothing to patch, which its probes find out, and one that no program here imports.
LIBRARY = {
    "transformers/__init__.py": "__version__ = '5.23.0'\n",
    "transformers/modeling_utils.py": "class PreTrainedModel:\n    pass\n",
    "peft/__init__.py": "",
}


def hook(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the hook says, without PyInstaller."""
    tools = types.ModuleType("PyInstaller.utils.hooks")
    tools.collect_submodules = lambda name, filter: filter
    tools.collect_data_files = lambda name, includes: []
    tools.copy_metadata = lambda name: [name]
    for name in ("PyInstaller", "PyInstaller.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, tools.__name__, tools)
    return runpy.run_path(str(HOOK))


def test_the_hook_leaves_out_every_library_that_the_package_imports(monkeypatch):
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if "startup" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
    own = {"diffusers_quantfix", "packaging", "wrapt"}
    assert set(hook(monkeypatch)["excludedimports"]) == found - own - set(sys.stdlib_module_names)


def test_the_hook_knows_every_patched_library(monkeypatch):
    from diffusers_quantfix.fixes import DISTRIBUTIONS, MODULES

    said = hook(monkeypatch)
    assert sorted(said["datas"]) == sorted(DISTRIBUTIONS)
    libraries = {module.partition(".")[0] for module in MODULES}
    assert set(said["module_collection_mode"]) == libraries - {"torch"}, "torch is collected so anyhow"
    needed = said["hiddenimports"]
    assert needed("diffusers_quantfix.fixes.peft.dora_gguf") and not needed("diffusers_quantfix.verify.run")


def test_the_wheel_says_where_the_hook_is(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(archive.read(name).decode())
    assert dict(points["pyinstaller40"]) == {"hook-dirs": "diffusers_quantfix_startup.freezing:folders"}
    assert "diffusers_quantfix_startup/freezing/hook-diffusers_quantfix.py" in archive.namelist()


def frozen(environment: Environment, program: pathlib.Path, *options: str) -> pathlib.Path:
    """The executable that PyInstaller makes of a program in this environment."""
    pytest.importorskip("PyInstaller")
    folder = program.parent / "frozen"
    checked(
        subprocess.run(
            [str(environment.python), "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN", "--distpath", folder,
             "--workpath", program.parent / "work", "--specpath", program.parent, *options, str(program)],
            capture_output=True, text=True, check=False, cwd=program.parent,
        )
    )  # fmt: skip
    made = folder / program.stem
    return made / program.stem if made.is_dir() else made


def told(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(checked(done).stdout.splitlines()[-1])


@pytest.fixture
def pyinstaller(own_environment: Environment) -> Environment:
    pytest.importorskip("PyInstaller")
    own_environment.adopt(
        "PyInstaller", "_pyinstaller_hooks_contrib", "altgraph", "setuptools", "pkg_resources"
    )
    for pattern in ("pyinstaller-*.dist-info", "pyinstaller_hooks_contrib-*.dist-info", "_distutils_hack"):
        for path in pathlib.Path(pytest.importorskip("PyInstaller").__file__).parents[1].glob(pattern):
            target = own_environment.site / path.name
            if not target.exists():
                target.symlink_to(path)
    for name, text in LIBRARY.items():
        (own_environment.site / name).parent.mkdir(exist_ok=True)
        (own_environment.site / name).write_text(text)
    return own_environment


@pytest.mark.long
@pytest.mark.parametrize("kind", ["--onedir", "--onefile"])
def test_a_small_program(pyinstaller: Environment, tmp_path, kind):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("IMPORTS", "import transformers.modeling_utils"))
    here = told(pyinstaller.run(program))
    made = frozen(pyinstaller, program, kind)
    done = subprocess.run(
        [str(made)], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    there = told(done)
    assert (here["frozen"], there["frozen"]) == (False, True)
    assert here["answers"] and there["answers"] == here["answers"]
    assert done.stderr == pyinstaller.run(program).stderr
    toc = checked(
        pyinstaller.run("-m", "PyInstaller.utils.cliutils.archive_viewer", "-l", "-r", "-b", made)
    ).stdout
    assert "transformers.modeling_utils" in toc and "diffusers_quantfix.fixes.peft.dora_gguf" in toc
    assert "peft" not in toc.replace("diffusers_quantfix.fixes.peft", ""), "a library that it does not import"


@pytest.mark.long
def test_a_program_with_diffusers(stack_environment: Environment, wheel, tmp_path):
    """Of 30 fixes none was applied, with 39 warnings that read like a broken installation."""
    for name in ("PyInstaller", "bitsandbytes"):
        pytest.importorskip(name)
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.replace("IMPORTS", "import bitsandbytes\nfrom diffusers import FluxTransformer2DModel")
    )
    here = told(stack_environment.run(program, HF_HUB_OFFLINE="1"))
    # diffusers asks for the metadata of what it needs, with this package or without it.
    needed = ("--recursive-copy-metadata", "diffusers", "--recursive-copy-metadata", "bitsandbytes")
    made = frozen(stack_environment, program, *needed, "--exclude-module", "matplotlib")
    there = told(subprocess.run([str(made)], capture_output=True, text=True, check=False))
    assert (here["frozen"], there["frozen"]) == (False, True)
    assert sum(state == "applied" for state, _ in there["answers"].values()) > 50
    assert there["answers"] == here["answers"]
