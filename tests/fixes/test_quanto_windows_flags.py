"""The flags that make quanto's CUDA source compile on Windows change nothing in the code for the GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from diffusers_quantfix.weights import quanto_extension
from tests.fixes import quanto_models as q

# What the host code of the kernels needs of torch, for a parser: the real header takes a minute to compile.
HEADER = """
#pragma once
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <vector>
#define __restrict__ __restrict
namespace at { struct Half {}; }
namespace torch {
enum Kind { kInt32 };
struct Sizes { std::vector<int64_t> vec(); };
struct TensorOptions {
  TensorOptions dtype(int); TensorOptions device(int);
};
struct Tensor {
  Sizes sizes(); int64_t numel(); int64_t size(int); int dtype(); int device();
  template <class T> T *data_ptr();
};
Tensor empty(std::vector<int64_t>, TensorOptions);
Tensor empty(std::initializer_list<int>, TensorOptions);
}
namespace at { using torch::Tensor; }
"""


@pytest.mark.thorough
@pytest.mark.long
def test_the_code_for_the_gpu_is_the_same(tmp_path, monkeypatch):
    q.quanto()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    from optimum.quanto.library.extensions import extension

    source = Path(extension.__file__).parent / "cuda/awq/v2/gemm_cuda.cu"
    assert len(re.findall(r"__asm__ __volatile__\(", source.read_text())) == 3
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/extension.h").write_text(HEADER)
    monkeypatch.setattr(quanto_extension.platform, "system", lambda: "Windows")
    flags = quanto_extension.flags_of_this_platform()
    assert flags[:2] == ("-D__asm__=asm", "-D__volatile__=volatile")

    def started(*more: str) -> subprocess.Popen[str]:
        options = ["-ptx", "-std=c++17", "-arch=sm_80", "--use_fast_math", "-DQUANTO_CUDA_ARCH=800", *more]
        return subprocess.Popen(
            [nvcc, *options, f"-I{tmp_path}", str(source), "-o", str(tmp_path / f"{len(more)}.ptx")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    for compiler in (started(), started(*flags)):
        output, _ = compiler.communicate()
        assert compiler.returncode == 0, output[-2000:]
    plain = (tmp_path / "0.ptx").read_text()
    assert "mma.sync.aligned.m16n8k16" in plain
    assert (tmp_path / f"{len(flags)}.ptx").read_text() == plain
