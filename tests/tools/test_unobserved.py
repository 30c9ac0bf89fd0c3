"""The program's function and dispatch modes do not see what a tool does, and cannot change or end it."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from diffusers_quantfix import audit, keep_host_copies, release, track
from tests.fixes.callers import stopped_at_each_line

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


def test_a_finalizer_that_release_runs():
    """It computes as anywhere: the program's modes are on."""
    import gc

    from torch.utils._device import DeviceContext

    made = []

    class Cycle:
        def __init__(self):
            self.own = self

        def __del__(self):
            made.append(torch.ones(1).device.type)

    subject = model()
    subject.kept = torch.ones(4)
    survivor = subject[0].weight.data  # noqa: F841  # memory is left, so garbage is collected
    with DeviceContext(torch.device("meta")):
        gc.collect()
        Cycle()
        release(subject)
    assert made == ["meta"]


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


def state_of_the_thread():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [
        torch._C._is_torch_function_enabled(),
        torch._C._is_torch_function_all_disabled()
        if hasattr(torch._C, "_is_torch_function_all_disabled")
        else None,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        *map(id, (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())),
    ]


@pytest.mark.parametrize("of", ["tool", "probe"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, dispatch_mode, function_mode, fake_mode])
def test_interrupted_at_each_line(mode, of):
    """A tool, or a probe while a library is imported: the program's modes are as before."""
    from diffusers_quantfix import finishing, surroundings, torch_modes

    def probe(_):
        with surroundings.usual():
            torch.zeros(1)

    trials = 0
    files = (contextlib, finishing, surroundings, torch_modes)
    with mode():
        before = state_of_the_thread()
        for _ in stopped_at_each_line(lambda: None, tool if of == "tool" else probe, *files):
            trials += 1
            assert state_of_the_thread() == before
        assert state_of_the_thread() == before
    assert trials > 5


def tool(_):
    audit({"a": torch.nn.Identity()})


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


@pytest.mark.parametrize(
    "tool",
    [
        "audit({'a': other})",
        pytest.param("track(other).__enter__().__exit__(None, None, None)", marks=pytest.mark.long),
    ],
)
def test_a_tool_within_a_trace(tool):
    """torch crashes at the end of a trace in which an error of the size of a tensor was expected."""
    program = f"""
import torch
from diffusers_quantfix import audit, track
other = torch.nn.Linear(2, 2)
class Model(torch.nn.Module):
    def forward(self, x):
        {tool}
        return x * 2
traced = torch.jit.trace(Model(), torch.ones(3), check_trace=False)
print(len(list(traced.graph.nodes())))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr[-2000:]
