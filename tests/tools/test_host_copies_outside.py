"""`keep_host_copies`: a program cannot tell, but by what is copied."""

from __future__ import annotations

import io
import threading

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory import host_copies

torch = pytest.importorskip("torch")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def test_threads_that_move_the_same_model(rig_devices):
    """Before: KeyError out of ``.to()``, or torch's own error, which copied a tensor whose data was exchanged."""
    one, errors = model(), []
    expected = [parameter.tolist() for parameter in one.parameters()]
    qf.keep_host_copies(one)

    def move():
        for _ in range(30):
            for place in (rig_devices.devices[0], "cpu"):
                try:
                    one.to(place)
                except Exception as error:
                    errors.append(error)

    threads = [threading.Thread(target=move) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [parameter.tolist() for parameter in one.to("cpu").parameters()] == expected
    one.to(rig_devices.devices[0])
    rig_devices.reset()
    one.to("cpu")
    assert rig_devices.traffic().d2h <= 8 * 4, "host copies are kept no more"


def test_a_move_that_waits_for_another_threads_move_ends(rig_devices, monkeypatch):
    monkeypatch.setattr(host_copies, "_PATIENCE", 0.2)

    class Waits(torch.nn.Linear):
        def _apply(self, fn, *args, **kwargs):
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=one.to, args=("cpu",))
                other.start()
                other.join()
            return super()._apply(fn, *args, **kwargs)

    one = torch.nn.Sequential(torch.nn.Linear(4, 4), Waits(4, 4))
    expected = [parameter.tolist() for parameter in one.parameters()]
    qf.keep_host_copies(one)
    for place in (rig_devices.devices[0], "cpu"):
        one.to(place)
    assert [parameter.tolist() for parameter in one.parameters()] == expected


def test_a_function_of_the_program_is_called_as_often_as_upstream_calls_it(gpu):
    """Before: once more, to see where it moves a tensor; a function that counts gave other weights."""
    one, seen = model(), []
    qf.keep_host_copies(one)

    def count(tensor):
        seen.append(tuple(tensor.shape))
        return torch.full_like(tensor, len(seen))

    one._apply(count)
    assert len(seen) == 4 and (0,) not in seen
    assert [parameter.unique().item() for parameter in one.parameters()] == [1, 2, 3, 4]
    one._apply(lambda tensor: tensor.to(gpu.devices[0]))
    assert {parameter.device for parameter in one.parameters()} == {gpu.devices[0]}


def test_buffers_that_a_move_takes_apart_stay_apart(gpu):
    """Before: they came back as views of the same memory, and a write to one changed the other."""
    one = model()
    base = torch.arange(8.0)
    one.register_buffer("whole", base)
    one.register_buffer("part", base[:4])
    one[1].weight = one[0].weight  # tied: one parameter, before and after
    del base
    qf.keep_host_copies(one)
    one.to(gpu.devices[0])
    one.to("cpu")
    one.whole.zero_()
    assert one.part.tolist() == [0, 1, 2, 3]
    assert one[1].weight is one[0].weight


def test_weights_that_are_untied_on_the_device_stay_apart(gpu):
    """Before: both came back as their host copies, which are one memory, and a write to one changed the other."""
    one = model()
    one[1].weight = one[0].weight
    qf.keep_host_copies(one)
    one.to(gpu.devices[0])
    one[1].weight = torch.nn.Parameter(one[1].weight.detach().clone())
    one.to("cpu")
    before = one[0].weight.tolist()
    with torch.no_grad():
        one[1].weight.zero_()
    assert one[0].weight.tolist() == before


def test_memory_that_is_one_on_the_device_is_one_afterwards(gpu):
    """An 8-bit layer that was loaded from a pickle has its weight twice, until it is on a device."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    one = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False, bias=False)
    one.to(gpu.devices[0])(torch.ones(1, 64, dtype=torch.float16, device=gpu.devices[0]))
    one.to("cpu")
    one.state.CB = one.state.CB.clone()
    qf.keep_host_copies(one)
    one.to(gpu.devices[0])
    if one.state.CB.data_ptr() != one.weight.data_ptr():
        pytest.skip("this bitsandbytes keeps them apart")
    one.to("cpu")
    assert one.state.CB.data_ptr() == one.weight.data_ptr()


def test_weights_made_in_inference_mode_are_normal_after_a_move_outside_of_it(gpu):
    with torch.inference_mode():
        one = model()
    qf.keep_host_copies(one)
    one.to(gpu.devices[0])
    one.to("cpu")
    assert not any(parameter.data.is_inference() for parameter in one.parameters())


def test_weights_do_not_come_back_into_memory_that_other_processes_have(gpu):
    one = model().share_memory()
    qf.keep_host_copies(one)
    one.to(gpu.devices[0])
    one.to("cpu")
    assert not any(parameter.is_shared() for parameter in one.parameters())


def test_a_file_of_a_kept_model_is_loaded_with_weights_only(gpu):
    one, file = model()[0], io.BytesIO()
    qf.keep_host_copies(one)
    one.to(gpu.devices[0]).to("cpu")
    torch.save(one, file)
    file.seek(0)
    with torch.serialization.safe_globals([torch.nn.Linear, set]):
        again = torch.load(file, weights_only=True)
    assert torch.equal(again.weight, one.weight)
    assert again.to(gpu.devices[0]).weight.device == gpu.devices[0]


def test_modes_of_the_program_see_what_upstream_does(gpu):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def counted(one, mode):
        del seen[:]
        with mode():
            one.to(gpu.devices[0])
            one.to("cpu")
        return seen.count(torch.Tensor.mul), seen.count(torch.ops.aten.mul.Tensor), len(seen)

    bare = [counted(model(), mode) for mode in (Functions, Operators)]
    kept = model()
    qf.keep_host_copies(kept)
    muls, _, functions = counted(kept, Functions)
    assert not muls and functions <= bare[0][2] + 4  # where upstream moves an empty tensor
    assert counted(kept, Operators) == bare[1]
