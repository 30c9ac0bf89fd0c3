"""Where the rig cannot be had it says why in one sentence, and importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rig import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rig is built on Linux only")


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Makes a compiler of a shell script; nothing is cached."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_find_torch", lambda: (tmp_path, "0.0"))

    def make(script: str):
        compiler = tmp_path / "c++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    return make


def test_no_compiler(fake_compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        build.Unavailable, match=r"^no C\+\+ compiler was found \(looked for no-such-compiler\)$"
    ):
        build.library()


def test_a_failing_compiler_is_quoted(fake_compiler):
    fake_compiler("echo 'In file x:' >&2; echo 'x.cpp:1: fatal error: no good' >&2; exit 1")
    with pytest.raises(build.Unavailable, match=r"failed: x.cpp:1: fatal error: no good$"):
        build.library()


def test_a_library_that_cannot_be_loaded_is_not_kept(fake_compiler, tmp_path):
    fake_compiler('while [ "$1" != -o ]; do [ -n "$1" ] || exit 0; shift; done; echo nonsense > "$2"')
    with pytest.raises(build.Unavailable, match="the fake CUDA device does not suit this torch"):
        build.library()
    assert not list((tmp_path / "cache").glob("*.so"))
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_torch_for_real_gpus_is_left_alone(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(build.Unavailable, match="built for real GPUs"):
        build.library()


def test_importing_the_rig_imports_nothing_of_weight():
    program = "import sys; from tests import rig; assert not {'torch', 'numpy', 'pytest'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
