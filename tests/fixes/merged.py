"""Models into which adapters of peft were merged: their bytes, what is kept of them, the offloads they are under."""

from __future__ import annotations

import contextlib
import logging
import os

from tests.fixes.callers import spelled

KEPT = "_quantfix_before_merge"

OFFLOADS = {
    "none": lambda pipe, device: pipe.to(device),
    "model": lambda pipe, device: pipe.enable_model_cpu_offload(device=spelled(device)),
    "sequential": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=spelled(device)),
    "leaf": lambda pipe, device: pipe.transformer.enable_group_offload(device, offload_type="leaf_level"),
    "stream": lambda pipe, device: pipe.transformer.enable_group_offload(
        onload_device=device, offload_type="leaf_level", use_stream=True
    ),
}


def bits(model) -> dict:
    """The bytes of every weight that is no adapter, and of what goes with it, on the CPU."""
    import torch

    return {
        name: inner.detach().cpu().clone().reshape(-1).view(torch.uint8)
        for key, tensor in model.state_dict().items()
        if "lora" not in key and isinstance(tensor, torch.Tensor)
        for name, inner in plain(key, tensor)
    }


def plain(name: str, tensor):
    """Those inside of a tensor subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        yield from plain(f"{name}.{inner}", getattr(tensor, inner))


def assert_same(one: dict, other: dict) -> None:
    import torch

    assert one and one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{', '.join(different)}: not what it was"


def keep_compiler(monkeypatch) -> None:
    """After the test ``CXX`` is what it was: peft leaves its own there when it cannot compile its kernel for BOFT."""
    for variable, name in (("CC", "gcc"), ("CXX", "g++")):
        monkeypatch.setenv(variable, os.environ.get(variable, name))


@contextlib.contextmanager
def without_memory(monkeypatch, tmp_path, caplog):
    """A block that runs where the host has no memory left for what is kept of merged weights; it is said once."""
    from diffusers_quantfix.adapters import before_merge
    from diffusers_quantfix.weights import host_memory

    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 11 kB\n")
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(before_merge, "_told", set())
    with caplog.at_level(logging.WARNING, "diffusers_quantfix"):
        yield
    assert caplog.text.count("not enough host memory to keep the packed weights") == 1


def kept(model) -> list:
    return [part for part in model.modules() if KEPT in vars(part)]


def layers_of(model) -> list:
    return [part for part in model.modules() if hasattr(part, "unmerge")]
