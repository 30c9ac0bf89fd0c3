"""Where the rig cannot be had it says why in one sentence, and importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diffusers_quantfix.verify.rig import NO_CODE
from tests.rig import build, toolchain, without_cuda

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rig is built on Linux only")


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Makes a compiler of a shell script; nothing is cached."""
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "find_torch", lambda: toolchain.Torch(tmp_path, "0.0"))

    def make(script: str):
        compiler = tmp_path / "c++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    return make


def test_no_compiler(fake_compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        toolchain.Unavailable, match=r"^no C\+\+ compiler was found \(looked for no-such-compiler\)$"
    ):
        build.library()


def test_a_failing_compiler_is_quoted(fake_compiler):
    fake_compiler("echo 'In file x:' >&2; echo 'x.cpp:1: fatal error: no good' >&2; exit 1")
    with pytest.raises(toolchain.Unavailable, match=r"failed: x.cpp:1: fatal error: no good$"):
        build.library()


@pytest.mark.long
def test_a_library_that_cannot_be_loaded_is_not_kept(fake_compiler, tmp_path):
    fake_compiler('while [ "$1" != -o ]; do [ -n "$1" ] || exit 0; shift; done; echo nonsense > "$2"')
    with pytest.raises(toolchain.Unavailable, match="the fake CUDA device does not suit this torch"):
        build.library()
    assert not list((tmp_path / "cache").glob("*.so"))
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_of_two_processes_one_builds(tmp_path):
    target = tmp_path / "built"
    program = (
        "import sys, time, pathlib; from tests.rig.toolchain import built_once\n"
        "with built_once(pathlib.Path(sys.argv[1])) as unfinished:\n"
        "    print(unfinished is not None, flush=True)\n"
        "    if unfinished: time.sleep(0.5); unfinished.write_text('whole')\n"
        "assert pathlib.Path(sys.argv[1]).read_text() == 'whole'"
    )
    command = [sys.executable, "-c", program, str(target)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(said) == ["False", "False", "True"]
    assert not any(process.returncode for process in processes)
    assert not list(tmp_path.glob("*.tmp"))


def test_what_fails_half_built_is_not_kept(tmp_path):
    with pytest.raises(ZeroDivisionError), toolchain.built_once(tmp_path / "built") as unfinished:
        unfinished.write_text("half")
        raise ZeroDivisionError
    assert [file.name for file in tmp_path.iterdir()] == ["built.lock"]


@pytest.fixture
def pretended_torch(tmp_path, monkeypatch):
    """Makes a torch of files only, as `find_torch` reads them."""
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(without_cuda, "keep_out", without_cuda.keep_out.__wrapped__)
    monkeypatch.setattr(without_cuda.glob, "glob", lambda pattern: [])

    def make(about: str) -> toolchain.Torch:
        package = tmp_path / "torch"
        (package / "lib").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "version.py").write_text(about)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        return toolchain.find_torch()

    return make


CUDA_BUILD = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"


def test_a_torch_for_another_accelerator_is_left_alone(pretended_torch):
    found = pretended_torch("__version__ = '2.8.0+rocm6.4'\ncuda = None\nhip: Optional[str] = '6.4'\n")
    assert (found.version, found.accelerator) == ("2.8.0+rocm6.4", "hip")
    with pytest.raises(toolchain.Unavailable, match="built for AMD's GPUs"):
        without_cuda.keep_out()


def test_a_real_gpu_comes_first(pretended_torch, monkeypatch):
    found = pretended_torch(CUDA_BUILD)
    for name in ("libtorch_cuda.so", "libtorch_python.so"):
        _library(found.libraries / name, "int of_cuda() { return 3; }")
    monkeypatch.setattr(without_cuda.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    with pytest.raises(toolchain.Unavailable, match=r"the machine has a GPU, whose code stays in place$"):
        without_cuda.keep_out()


def test_a_torch_that_is_there_already_is_too_late(pretended_torch, monkeypatch):
    found = pretended_torch(CUDA_BUILD)
    for name in ("libtorch_cuda.so", "libtorch_python.so"):
        _library(found.libraries / name, "int of_cuda() { return 3; }")
    monkeypatch.setattr(without_cuda, "find_torch", lambda: found)
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(toolchain.Unavailable, match=r"was imported before the rig could keep that code out$"):
        without_cuda.keep_out()


def test_an_empty_library_takes_the_place_of_cudas(pretended_torch):
    found = pretended_torch(CUDA_BUILD)
    _library(found.libraries / "libtorch_cuda.so", "int of_cuda() { return 3; } int unasked() { return 4; }")
    _library(found.libraries / "libtorch_python.so", "int of_cuda(); int asks() { return of_cuda(); }")
    program = (
        "import ctypes, sys; stub = ctypes.CDLL(sys.argv[1]); stub.of_cuda.restype = ctypes.c_void_p\n"
        "assert stub.of_cuda() and not hasattr(stub, 'unasked')\n"
        "stub.rig_arm(); stub.of_cuda()"
    )
    stub = without_cuda.library(found)
    done = subprocess.run(
        [sys.executable, "-c", program, str(stub)], capture_output=True, text=True, check=False
    )
    assert f"{NO_CODE}, which has of_cuda" in done.stderr
    soname = subprocess.run(["readelf", "-d", str(stub)], capture_output=True, text=True, check=True)
    assert "soname: [libtorch_cuda.so]" in soname.stdout


def test_what_its_constructors_make_has_a_type(pretended_torch):
    """torch 2.15 makes an object of CUDA's while it is imported and asks for its type."""
    declared = "namespace of { struct Cuda { Cuda(); virtual int asked(); }; }"
    found = pretended_torch(CUDA_BUILD)
    defined = "of::Cuda::Cuda() {} int of::Cuda::asked() { return 3; }"
    _library(found.libraries / "libtorch_cuda.so", f"{declared} {defined}")
    makes = "of::Cuda* made = new of::Cuda; return dynamic_cast<void*>(made) == made;"
    _library(found.libraries / "libtorch_python.so", f"{declared} int make() {{ {makes} }}")
    program = (
        "import ctypes, sys; stub, asking = (ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in sys.argv[1:])\n"
        "assert asking.make() == 1\n"
        "stub.rig_arm(); asking.make()"
    )
    libraries = [without_cuda.library(found), found.libraries / "libtorch_python.so"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, libraries)], capture_output=True, text=True, check=False
    )
    assert f"{NO_CODE}, which has _ZN2of4CudaC1Ev" in done.stderr


def _library(path, functions: str) -> None:
    command = [
        toolchain.find_compiler(),
        "-x",
        "c++",
        "-",
        "-shared",
        "-fPIC",
        "-Wl,--unresolved-symbols=ignore-all",
    ]
    source = f'extern "C" {{ {functions} }}'
    subprocess.run([*command, "-o", str(path)], input=source, text=True, check=True)


def test_importing_the_rig_imports_nothing_of_weight():
    program = "import sys; from tests import rig; assert not {'torch', 'numpy', 'pytest'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
