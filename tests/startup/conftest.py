"""A fresh environment with the wheel, as a user has it."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# An expression: whether the package is there once a library is asked for.
ACTIVE = (
    "[__import__('importlib.util').util.find_spec('diffusers'), "
    "'diffusers_quantfix' in __import__('sys').modules][1]"
)


class Environment:
    """A virtual environment with the wheel, wrapt and packaging in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def run(
        self, *arguments: object, given: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run its interpreter, with nothing in the environment but what is named; ``given`` on standard input."""
        return subprocess.run(
            [str(self.python), *map(str, arguments)], input=given,
            capture_output=True, text=True, check=False, cwd=self.folder, env=environment, timeout=120,
        )  # fmt: skip

    def pip(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    @property
    def site(self) -> pathlib.Path:
        return pathlib.Path(
            self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )

    def adopt(self, *names: str) -> None:
        """Lend it distributions of the environment that runs the tests, so that no registry is asked."""
        ours = pathlib.Path(sysconfig.get_path("purelib"))
        for name in names:
            for path in [ours / name, *ours.glob(f"{name}-*.dist-info")]:
                (self.site / path.name).symlink_to(path)


def checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return _built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return _built("sdist", tmp_path_factory.mktemp("sdist"))


def _built(kind: str, folder: pathlib.Path) -> pathlib.Path:
    for name in ("build", "hatchling"):
        pytest.importorskip(name, reason=f"the test extra is not installed: no {kind} to build")
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, ROOT]
    checked(subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False))
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def shared_environment(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _made(wheel, tmp_path_factory.mktemp("shared"))


@pytest.fixture
def environment(shared_environment: Environment) -> Environment:
    """An environment in which nothing is chosen, for tests that leave its files alone."""
    (shared_environment.site / "diffusers_quantfix_startup" / "choice").write_text("")
    return shared_environment


@pytest.fixture
def own_environment(wheel: pathlib.Path, tmp_path: pathlib.Path) -> Environment:
    """An environment to break."""
    return _made(wheel, tmp_path)


def _made(wheel: pathlib.Path, folder: pathlib.Path) -> Environment:
    made = Environment(folder / "environment")
    # pip from outside: an environment with a pip of its own takes seconds to make
    venv = [sys.executable, "-m", "venv", "--without-pip", str(made.folder)]
    checked(subprocess.run(venv, capture_output=True, text=True, check=False))
    checked(made.pip("install", "--no-index", "--no-deps", wheel))
    made.adopt("wrapt", "packaging")
    return made


@pytest.fixture(scope="session")
def stack_environment(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel that finds the libraries of the environment that runs the tests."""
    for name in ("torch", "diffusers", "accelerate"):
        pytest.importorskip(name, reason="the stack is not installed")
    made = _made(wheel, tmp_path_factory.mktemp("stack"))
    # A plain path: start-up files of the environment of the tests are not read through it.
    (made.site / "a_stack.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


class Bench:
    """A base interpreter and its pip, for installs that no virtual environment takes part in."""

    python = pathlib.Path(getattr(sys, "_base_executable", sys.executable)).resolve()

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            capture_output=True, text=True, check=False, cwd="/", env={"PATH": "/usr/bin:/bin", **environment},
        )  # fmt: skip
