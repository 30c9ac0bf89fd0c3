"""Which device is meant by a request, on machines that we do not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diffusers_quantfix.loading import device
from tests.gate import unmet


def machine(monkeypatch, kind: str, count: int = 1, current: int = 0) -> None:
    """Have torch see ``count`` devices of one kind and no others."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: kind == "xpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    if kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        monkeypatch.setattr(module, "device_count", lambda: count)
        monkeypatch.setattr(module, "current_device", lambda: current)


@pytest.mark.parametrize(
    ("kind", "count", "current", "expected"),
    [("cuda", 2, 1, "cuda:1"), ("xpu", 2, 1, "xpu:1"), ("mps", 1, 0, "mps:0"), ("cpu", 1, 0, "cpu")],
)
def test_without_a_request(monkeypatch, kind, count, current, expected):
    machine(monkeypatch, kind, count, current)
    assert str(device.chosen_device(None)) == expected
    assert str(device.chosen_device(kind)) == expected
    assert str(device.chosen_device({"": kind})) == expected
    assert str(device.chosen_device("cpu")) == "cpu"


OTHER_KIND = """
import torch, types
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("torch.npu")
module.is_available, module.device_count, module.current_device = lambda: True, lambda: 2, lambda: 1
module.memory_allocated = lambda device: 5
torch._register_device_module("npu", module)
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("npu")
from diffusers_quantfix.advisories import machine
from diffusers_quantfix.loading import device
from diffusers_quantfix.memory import accelerators
print(device.chosen_device(None), device.chosen_device(0), device.accelerator_types(), accelerators.devices())
print(machine.accelerator())
"""


@pytest.mark.skipif(bool(unmet("torch>=2.6")), reason="torch names other accelerators since 2.6")
def test_an_accelerator_that_torch_has_no_name_of_its_own_for():
    # Another process: torch gives such a name once and for good.
    done = subprocess.run([sys.executable, "-c", OTHER_KIND], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "npu:1 npu:0 ['npu'] ['npu:0', 'npu:1']",
        "('npu', '2 x npu')",
    ], done.stderr


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_an_index_counts_the_accelerators_that_are_there(monkeypatch, kind):
    machine(monkeypatch, kind, count=2)
    for request in (1, {"": 1}, f"{kind}:1", {"first": 1, "second": 1}):
        assert str(device.chosen_device(request)) == f"{kind}:1"


@pytest.mark.parametrize(
    ("kind", "request_", "text"),
    [
        ("cuda", 2, r"asks for cuda:2, and this machine has cuda:0, cuda:1: pass an existing device"),
        ("xpu", "cuda:0", r"asks for cuda:0, and this machine has xpu:0, xpu:1: pass an existing device"),
        ("mps", 1, r"asks for mps:1, and this machine has mps:0: pass an existing device"),
        (
            "cpu",
            0,
            r"asks for cuda:0, and this machine has the CPU only: pass .*, or omit device_map to use cpu",
        ),
        ("cuda", "meta", r"asks for meta, .*: pass an existing device"),
        ("cuda", "cdua:0", r"device_map='cdua:0' names no device: pass one such as 'cuda:0'"),
        ("cuda", 1.5, r"device_map='1.5' names no device: pass one such as 'cuda:0'"),
    ],
)
def test_no_such_device(monkeypatch, kind, request_, text):
    machine(monkeypatch, kind, count=2)
    with pytest.raises(ValueError, match=text):
        device.chosen_device(request_)


def test_it_is_light():
    code = "import diffusers_quantfix.loading.device, sys; sys.exit('torch' in sys.modules or 'typing' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", code], check=False).returncode == 0
