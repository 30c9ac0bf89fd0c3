"""The program's function and dispatch modes do not see what a tool does, and cannot change or end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diffusers_quantfix import audit, keep_host_copies, release, track

torch = pytest.importorskip("torch", reason="torch is not installed")


def function_mode():
    from torch.overrides import TorchFunctionMode

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise LookupError(func)

    return Refusing()


def dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise LookupError(func)

    return Refusing()


def fake_mode():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


modes = pytest.mark.parametrize("mode", [function_mode, dispatch_mode, fake_mode])


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


BYTES = {"cpu": 2 * (64 + 8) * 4}


@modes
def test_audit(mode):
    subject = model()
    with mode():
        assert audit(subject).bytes == BYTES


@modes
def test_release(mode):
    subject = model()
    with mode():
        assert release(subject).freed == BYTES
    assert not [name for name, _ in subject.named_parameters() if name != "released"]


@modes
def test_track(mode):
    subject = model()
    with mode():
        memory = track(subject)
        with memory:
            memory.mark("now")
    assert memory.peak == BYTES


@modes
def test_keep_host_copies(mode, gpu):
    subject = model()
    before = subject[0].weight.detach().clone()
    with mode():
        keep_host_copies(subject)
    subject.to(gpu.devices[0]).to("cpu")
    assert torch.equal(subject[0].weight, before)


def test_an_attribute_whose_class_raises():
    class Raising(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise LookupError(func)

    subject = model()
    subject.extra = torch.ones(4).as_subclass(Raising)
    assert audit(subject).bytes == {"cpu": BYTES["cpu"] + 16}
    assert release(subject).freed == {"cpu": BYTES["cpu"] + 16}


def test_a_tool_that_is_used_first_within_a_mode():
    """It keeps nothing that the mode said."""
    program = (
        "import torch, diffusers_quantfix as qf\n"
        "class Meta(torch.overrides.TorchFunctionMode):\n"
        "    def __torch_function__(self, func, types, args=(), kwargs=None):\n"
        "        return func(*(('meta',) if func is torch.device else args), **(kwargs or {}))\n"
        "model = torch.nn.Linear(2, 2)\n"
        "with Meta():\n"
        "    qf.audit(model), qf.keep_host_copies(model)\n"
        "with qf.track(model) as memory: pass\n"
        "print(memory.peak)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{'cpu': 24}\n"
