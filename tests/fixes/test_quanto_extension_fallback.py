"""quanto-extension-fallback: int4 and int2 weights need a working compiler."""

from __future__ import annotations

import contextlib
import logging

import pytest

from tests.fixes import quanto_kernels
from tests.fixes import quanto_models as q
from tests.time_limit import TimeIsUp, time_limit

FIX_ID = "quanto-extension-fallback"

# What torch.utils.cpp_extension says when the compiler is not there.
LOG = """Error building extension 'quanto_cpp': [1/3] /no/such/c++ -MMD -MF unpack.o.d -c unpack.cpp -o unpack.o
FAILED: [code=127] unpack.o
/bin/sh: 1: /no/such/c++: not found
ninja: build stopped: subcommand failed.
"""


class Loader:
    """Stands in for ``torch.utils.cpp_extension.load``."""

    def __init__(self, error: Exception | None = None, lib: object = None) -> None:
        self.error = error or RuntimeError(LOG)
        self.lib = lib
        self.calls: list[dict] = []

    def __call__(self, **arguments):
        self.calls.append(arguments)
        if self.lib is None:
            raise self.error
        return self.lib


@pytest.fixture
def loader(monkeypatch, tmp_path):
    """A compiler that fails, in the place of the real one; the CPU extension has not been loaded yet."""
    q.quanto()
    from optimum.quanto.library.extensions import cpp, extension

    loader = Loader()
    monkeypatch.setattr(extension, "load", loader)
    monkeypatch.setattr(cpp.ext, "build_directory", str(tmp_path / "build"))
    for name in ("_lib", "_quantfix_stand_in"):
        monkeypatch.setitem(vars(cpp.ext), name, None)
    return loader


def new_extension(tmp_path, name="quanto_cuda", cuda_flags=("--use_fast_math",)):
    from optimum.quanto.library.extensions.extension import Extension

    return Extension(
        name, str(tmp_path), ["a.cpp"], extra_cflags=["-O3"], extra_cuda_cflags=list(cuda_flags)
    )  # fmt: skip


@contextlib.contextmanager
def chosen(monkeypatch, setting: str = "", system: str = "Linux"):
    import platform

    with monkeypatch.context() as patch:
        patch.setenv("DIFFUSERS_QUANTFIX", setting)
        patch.setattr(platform, "system", lambda: system)
        yield


@pytest.mark.defect(FIX_ID, shows=r"Error building extension 'quanto_cpp'|compiled \d+ times")
def test_a_model_runs_without_a_compiler(loader):
    """Up to 0.2.5 it does without us too, but compiles anew for every weight that it unpacks."""
    for qtype in ("qint4", "qint2"):
        model = q.layers(qtype)
        for _ in range(2):
            assert q.error(q.run(model), q.run(q.plain_layers())) < q.TOLERANCE[qtype[1:]]
    assert len(loader.calls) == 1, f"compiled {len(loader.calls)} times"


@pytest.mark.defect(FIX_ID, shows=r"Ninja is required|CUDA_HOME|Read-only|the first error")
def test_every_fault_of_a_toolchain(loader, tmp_path):
    """Among them a library folder that nobody can write to."""
    import torch

    packed = torch.arange(256, dtype=torch.uint8)
    for error in (
        RuntimeError("Ninja is required to load C++ extensions (pip install ninja to get it)"),
        OSError("CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
        ImportError("quanto_cpp.so: undefined symbol: _ZN3c105ErrorC2E"),
        PermissionError(30, "Read-only file system", "/usr/lib/python3/site-packages/optimum/quanto/build"),
    ):
        loader.error = error
        assert new_extension(tmp_path).lib.unpack(packed, 4).shape == (512,)


def test_a_time_limit_of_the_program_is_heard(loader, tmp_path, monkeypatch):
    """Before: the extension "could not be compiled" then, for the rest of the process."""
    from optimum.quanto.library.extensions import extension

    made = new_extension(tmp_path)
    with time_limit() as over, monkeypatch.context() as patch:
        patch.setattr(extension, "load", over)
        with pytest.raises(TimeIsUp):
            made.lib  # noqa: B018
    loader.lib = lib = object()
    assert made.lib is lib


def test_one_warning_names_the_first_line_of_the_cause(loader, caplog):
    with caplog.at_level(logging.INFO, "diffusers_quantfix"):
        q.run(q.layers("qint4"))
        q.run(q.layers("qint2"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "quanto_cpp could not be compiled: /bin/sh: 1: /no/such/c++: not found; PyTorch unpacks int4 and int2 weights "
        "and multiplies instead: same results, slower"
    )


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (LOG, "/bin/sh: 1: /no/such/c++: not found"),
        ("Ninja is required to load C++ extensions", "Ninja is required to load C++ extensions"),
        (
            "Error building extension 'x': [1/2] c++ a.cpp\na.cpp:1:10: fatal error: Python.h: No such file",
            "a.cpp:1:10: fatal error: Python.h: No such file",
        ),
        (
            'Error building extension\ngemm_cuda.cu(95): error: identifier "__asm__" is undefined',
            'gemm_cuda.cu(95): error: identifier "__asm__" is undefined',
        ),
        ("something else\nat all", "RuntimeError: something else"),
        ("", "RuntimeError:"),
    ],
)
def test_the_line_that_tells(log, line):
    from diffusers_quantfix.fixes.quanto.extension_fallback import first_line_of_the_cause

    assert first_line_of_the_cause(RuntimeError(log)).strip() == line


def test_a_working_compiler_is_used_as_ever(loader, tmp_path):
    loader.lib = object()
    extension = new_extension(tmp_path)
    assert extension.lib is loader.lib and extension.lib is loader.lib
    (call,) = loader.calls
    assert call["extra_cuda_cflags"] == ["--use_fast_math"] and call["extra_cflags"] == ["-O3"]
    assert (tmp_path / "build" / "pytorch_version.txt").exists()


def test_the_flags_of_windows_and_only_there(loader, tmp_path, monkeypatch):
    import torch

    loader.lib = object()
    flags = ["-D__asm__=asm", "-D__volatile__=volatile"]
    for setting in ("quanto:build", "quanto:marlin"):
        for version, more in (
            ("2.8.0+cu128", []),
            ("2.9.1+cu130", ["-DUSE_CUDA=1"]),
            ("2.13.0", ["-DUSE_CUDA=1"]),
        ):
            with chosen(monkeypatch, setting, "Windows"), monkeypatch.context() as patch:
                patch.setattr(torch, "__version__", version)
                extension = new_extension(tmp_path)
                assert extension.lib is loader.lib
            assert loader.calls[-1]["extra_cuda_cflags"] == ["--use_fast_math", *flags, *more]
            assert extension.extra_cuda_cflags == ["--use_fast_math"], "the extension keeps its own flags"
    with chosen(monkeypatch, "quanto:build", "Windows"):
        cpp = new_extension(tmp_path, "quanto_cpp")
        cpp.extra_cuda_cflags = None
        assert cpp.lib is loader.lib
    assert loader.calls[-1]["extra_cuda_cflags"] is None, "C++ needs none of them"
    for setting in ("", "quanto:build"):
        with chosen(monkeypatch, setting, "Linux"):
            assert new_extension(tmp_path).lib is loader.lib
        assert loader.calls[-1]["extra_cuda_cflags"] == ["--use_fast_math"]


@pytest.mark.parametrize(
    ("setting", "system", "reason"),
    [
        ("", "Windows", "is not compiled on Windows unless DIFFUSERS_QUANTFIX=quanto:build asks for it"),
        ("quanto:no-build", "Linux", "was not compiled, as DIFFUSERS_QUANTFIX=quanto:no-build asks"),
        ("quanto:no-build", "Darwin", "was not compiled, as DIFFUSERS_QUANTFIX=quanto:no-build asks"),
        (
            "quanto:no-build,quanto:build",
            "Windows",
            "was not compiled, as DIFFUSERS_QUANTFIX=quanto:no-build asks",
        ),
    ],
)
def test_where_nothing_is_compiled(loader, monkeypatch, caplog, setting, system, reason):
    """No attempt and no warning: it is what was asked for, or what is normal there."""
    with chosen(monkeypatch, setting, system), caplog.at_level(logging.INFO, "diffusers_quantfix"):
        assert q.error(q.run(q.layers("qint4")), q.run(q.plain_layers())) < q.TOLERANCE["int4"]
    assert not loader.calls
    (record,) = caplog.records
    assert record.levelname == "INFO" and f"quanto_cpp {reason};" in record.getMessage()


def test_one_attempt_also_from_many_threads(loader, tmp_path):
    import threading

    extension = new_extension(tmp_path)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(extension.lib)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loader.calls) == 1
    assert len(found) == 8 and len({id(lib) for lib in found}) == 1


def test_int4_on_a_gpu_by_awq_without_its_kernels(gpu, monkeypatch):
    """Weights that quanto packs for AWQ: dequantize and multiply, for one row and for many, with the bias."""
    import torch

    q.quanto()
    quanto_kernels.capable(monkeypatch)
    device = gpu.devices[0]
    library = q.quanto()
    model = q.plain_layers(torch.float16).to(device)
    library.quantize(model, weights=library.qint4)
    library.freeze(model)
    assert type(model[0].weight).__name__ == "AWQWeightQBitsTensor"
    for rows in (1, 3, 20):
        reference = q.run(q.layers("qint4", torch.float16), torch.float16, rows=rows)
        assert q.error(q.run(model, torch.float16, rows=rows, device=device), reference) < 0.005


def test_what_it_cannot_stand_in_for_says_so():
    with pytest.raises(
        AttributeError, match="marlin_gemm_f16i4 needs the extension quanto_cuda, which is not there"
    ):
        _ = quanto_kernels.stand_in().marlin_gemm_f16i4


@pytest.mark.long
def test_unpacking_equals_the_compiled_one(monkeypatch):
    """The extension that quanto compiles at its first use, here like anywhere else."""
    import torch

    q.quanto()
    from optimum.quanto.library.extensions import cpp

    for name in ("_lib", "_quantfix_stand_in"):
        monkeypatch.setitem(vars(cpp.ext), name, None)
    compiled, ours = cpp.ext.lib, quanto_kernels.stand_in()
    if type(compiled) is type(ours):
        pytest.skip(f"{compiled.name} {compiled.reason}")
    for bits in (2, 4):
        for shape in ((256,), (64, 4), (2, 4, 32), (1, 256)):
            packed = torch.arange(256, dtype=torch.uint8).reshape(shape)
            expected, found = compiled.unpack(packed, bits), ours.unpack(packed, bits)
            assert found.dtype == expected.dtype == torch.uint8
            assert torch.equal(found, expected), (bits, shape)


@pytest.mark.long
def test_a_broken_compiler_in_a_process_of_its_own(tmp_path):
    """The real ``torch.utils.cpp_extension.load`` with a compiler that is not there."""
    q.quanto()
    done = q.script(
        """
import sys, diffusers_quantfix
from optimum.quanto.library.extensions import cpp
from tests.fixes import quanto_models as q
q.quanto()
cpp.ext.build_directory, cpp.ext._lib = sys.argv[1], None
print(q.error(q.run(q.layers("qint4")), q.run(q.plain_layers())))
""",
        str(tmp_path),
        CXX="/no/such/c++",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < q.TOLERANCE["int4"]
    (line,) = [line for line in done.stderr.splitlines() if "PyTorch unpacks" in line]
    assert "/no/such/c++" in line and "not found" in line
