"""The wheel in a fresh environment: an editable install is not what a user gets."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from packaging.requirements import Requirement

pytest.importorskip("build", reason="the test extra is not installed: no wheel to build")
pytest.importorskip("hatchling", reason="the test extra is not installed: no wheel to build")

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd="/"
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> pathlib.Path:
    """A new environment with the wheel; its two dependencies come from this one, so no registry is asked."""
    folder = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", folder).returncode == 0
    python = folder / "bin" / "python"
    done = run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"diffusers_quantfix"}
    assert "diffusers_quantfix/py.typed" in names


def test_only_small_packages_are_required(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert sorted(Requirement(line.partition(":")[2]).name for line in required) == ["packaging", "wrapt"]
    assert "Requires-Python: >=3.10" in metadata


def test_it_works_with_no_library_installed_and_leaves_nothing_behind(environment):
    python = environment / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    ours = sysconfig.get_path("purelib")
    imported = run(
        python, "-c", "import diffusers_quantfix as qf, sys; print(qf.__version__, len(sys.modules) < 200)"
    )
    assert imported.stdout.split()[1] == "True", imported.stderr
    # the two dependencies, for the board
    done = subprocess.run(
        [str(environment / "bin" / "diffusers-quantfix"), "status", "--json"],
        capture_output=True, text=True, check=False, cwd="/", env={"PYTHONPATH": _links(environment, ours)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    states = {fix["id"]: fix["state"] for fix in json.loads(done.stdout)["fixes"]}
    assert states and set(states.values()) == {"missing"}
    assert run(python, "-m", "pip", "uninstall", "-q", "-y", "diffusers-quantfix").returncode == 0
    left = [path for path in pathlib.Path(site).rglob("*quantfix*") if "__pycache__" not in path.parts]
    assert left == []


def _links(environment: pathlib.Path, site: str) -> str:
    """A folder with nothing but wrapt and packaging of this environment."""
    folder = environment / "dependencies"
    folder.mkdir()
    for name in ("wrapt", "packaging"):
        (folder / name).symlink_to(pathlib.Path(site) / name)
        for info in pathlib.Path(site).glob(f"{name}-*.dist-info"):
            (folder / info.name).symlink_to(info)
    return str(folder)
