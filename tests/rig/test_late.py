"""Devices that take time: who does not wait is reported, with both ends; who does is not; late results are the same."""

from __future__ import annotations

import inspect
import threading

import pytest

from tests import rig
from tests.gate import unmet
from tests.rig.fixtures import require_rig

torch = pytest.importorskip("torch")

SIZE = 1000


@pytest.fixture
def late():
    require_rig()
    with rig.devices(late=True):
        yield Program()


class Program:
    """A compute stream (the default one), a transfer stream, and pinned memory."""

    def __init__(self):
        self.device = torch.device("cuda", 1)
        torch.cuda.set_device(self.device)
        self.compute = torch.cuda.current_stream()
        self.transfer = torch.cuda.Stream()
        self.pinned = torch.ones(SIZE).pin_memory()

    def bring(self):
        with torch.cuda.stream(self.transfer):
            return self.pinned.to(self.device, non_blocking=True)


def the_hazard(kind: str, first: str, second: str):
    """The only hazard, whose ends are the lines of the calling test that end with these comments."""
    (hazard,) = rig.hazards()
    assert hazard.kind == kind, hazard
    test = inspect.currentframe().f_back.f_code
    lines, start = inspect.getsourcelines(test)
    for end, comment in ((hazard.first, first), (hazard.second, second)):
        (line,) = (start + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {comment}"))
        assert (
            f"{test.co_filename}:{line} in " in end.frames[0]
            or f"{test.co_filename}:{line} in " in end.frames[1]
        )
    return hazard


def is_poison(tensor) -> bool:
    return bool(tensor.isnan().all())


# ---- who does not wait


def test_a_race(late):
    weight = late.bring()  # begun
    result = weight + 1  # read
    hazard = the_hazard("race", "begun", "read")
    assert "stream" in hazard.first.who and hazard.second.who == "device 1, default stream"
    assert is_poison(result)
    assert str(hazard).count(f"{__file__}:") >= 2


def test_a_race_of_bytes(late):
    """What is copied holds 0xFF, whatever it means."""
    late.pinned = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    assert (late.bring() == 0xFF).all()


def test_a_race_the_other_way(late):
    """A stream writes to what another one reads."""
    weight = torch.zeros(SIZE, device=late.device)
    late.transfer.wait_stream(late.compute)
    weight.sum()  # read
    with torch.cuda.stream(late.transfer):
        weight.copy_(late.pinned, non_blocking=True)  # begun
    the_hazard("race", "read", "begun")


def test_an_early_host_read(late):
    result = torch.ones(SIZE, device=late.device).to("cpu", non_blocking=True)  # begun
    assert is_poison(result)  # read
    the_hazard("early host read", "begun", "read")
    torch.cuda.synchronize()
    assert (result == 1).all()
    assert len(rig.hazards()) == 1


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x.tolist()], ids=["numpy", "tolist"])
def test_an_early_host_read_without_an_operator(late, read):
    result = torch.ones(SIZE, device=late.device).to("cpu", non_blocking=True)  # begun
    read(result)  # read
    the_hazard("early host read", "begun", "read")


def test_an_early_host_write(late):
    result = torch.ones(SIZE, device=late.device).to("cpu", non_blocking=True)  # begun
    result.zero_()  # written
    the_hazard("early host write", "begun", "written")


def test_a_changed_source(late):
    weight = late.bring()  # begun
    late.pinned.fill_(2)  # written
    late.transfer.synchronize()
    the_hazard("changed source", "begun", "written")
    assert (weight == 2).all()


def test_reuse(late):
    weight = late.bring()
    late.compute.wait_stream(late.transfer)
    weight.sum()  # read
    del weight
    with torch.cuda.stream(late.transfer):
        torch.empty(SIZE, device=late.device)  # allocated
    hazard = the_hazard("reuse", "read", "allocated")
    assert hazard.freed[0].endswith(" in test_reuse")


def test_reuse_with_another_stream_recorded(late):
    """As diffusers did up to 0.35.2 (issue 12673)."""
    weight = late.bring()
    late.compute.wait_stream(late.transfer)
    weight.sum()  # read
    weight.record_stream(late.transfer)
    del weight
    with torch.cuda.stream(late.transfer):
        torch.empty(SIZE, device=late.device)  # allocated
    the_hazard("reuse", "read", "allocated")


def test_an_early_free(late):
    weight = late.bring()
    late.compute.wait_stream(late.transfer)
    weight.sum()  # read
    del weight  # freed
    the_hazard("early free", "read", "freed")


def test_a_race_in_a_backward_pass(late):
    """Autograd's own threads have no Python code; they are where the thread is that waits for them."""
    weight = torch.zeros(SIZE, device=late.device)
    inputs = torch.ones(SIZE, device=late.device, requires_grad=True)
    loss = (inputs * weight).sum()
    late.transfer.wait_stream(late.compute)
    with torch.cuda.stream(late.transfer):
        weight.data.copy_(late.pinned, non_blocking=True)  # begun
    loss.backward()  # read
    the_hazard("race", "begun", "read")
    assert is_poison(inputs.grad)


def test_a_race_in_another_thread(late):
    weight = late.bring()  # begun

    def work():
        weight.sum()  # read

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    the_hazard("race", "begun", "read")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_race_in(late, mode):
    with mode():
        weight = late.bring()  # begun
        torch.nn.functional.linear(weight.view(10, 100), torch.ones(3, 100, device=late.device))  # read
    the_hazard("race", "begun", "read")


def test_an_event_before_the_copy_is_not_enough(late):
    event = late.transfer.record_event()
    weight = late.bring()  # begun
    event.wait()
    assert is_poison(weight * 1)  # read
    the_hazard("race", "begun", "read")


def test_the_default_stream_does_not_wait_by_itself(late):
    weight = late.bring()  # begun
    late.compute.synchronize()
    weight.sum()  # read
    the_hazard("race", "begun", "read")


# ---- who does


def _event(late):
    late.compute.wait_event(late.transfer.record_event())


def _host_waits_for_an_event(late):
    event = torch.cuda.Event()
    event.record(late.transfer)
    event.synchronize()


WAITS = {
    "event": _event,
    "host waits for an event": _host_waits_for_an_event,
    "wait_stream": lambda late: late.compute.wait_stream(late.transfer),
    "stream.synchronize": lambda late: late.transfer.synchronize(),
    "synchronize": lambda late: torch.cuda.synchronize(),
    "query": lambda late: late.transfer.query(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_healthy(late, wait):
    weight = late.bring()
    weight.record_stream(late.compute)
    WAITS[wait](late)
    result = weight * 3
    del weight
    with torch.cuda.stream(late.transfer):
        torch.empty(SIZE, device=late.device)
    assert (result == 3).all()
    assert not rig.hazards()


def test_events_order_streams_one_behind_the_other(late):
    third = torch.cuda.Stream()
    weight = late.bring()
    third.wait_stream(late.transfer)
    late.compute.wait_event(third.record_event())
    assert (weight == 1).all()
    assert not rig.hazards()


def test_blocking_copies_are_waited_for(late):
    """torch's own sanitizer does not know that."""
    with torch.cuda.stream(late.transfer):
        weight = torch.ones(SIZE).to(late.device)
        pinned = late.pinned.to(late.device)
    late.pinned.copy_(weight + pinned)
    assert (late.pinned == 2).all()
    assert ((weight + pinned).cpu() == 2).all()
    assert not rig.hazards()


def test_item_and_nonzero_let_the_host_wait(late):
    for wait in (lambda x: x.sum().item(), torch.nonzero, lambda x: x[x > 0], lambda x: torch.equal(x, x)):
        weight = late.bring()
        with torch.cuda.stream(late.transfer):
            wait(weight)
        assert (weight == 1).all()
    assert not rig.hazards()


def test_pageable_memory_is_read_at_once(late):
    source = torch.ones(SIZE)
    weight = source.to(late.device, non_blocking=True)
    source.zero_()
    assert (weight == 1).all()
    target = torch.zeros(SIZE)
    target.copy_(weight, non_blocking=True)
    assert (target == 1).all()
    assert not rig.hazards()


def test_what_is_converted_is_read_at_once(late):
    weight = late.pinned.to(late.device, torch.float16, non_blocking=True)
    late.pinned.zero_()
    assert (weight == 1).all()
    assert not rig.hazards()


def test_pinned_memory_may_be_freed(late):
    weight = torch.ones(SIZE).pin_memory().to(late.device, non_blocking=True)
    assert not rig.allocated("cuda:0") and rig.allocated(late.device) == weight.nbytes
    assert (weight == 1).all()
    assert not rig.hazards()


def test_memory_of_the_same_stream_is_freed_and_used_again(late):
    for _ in range(2):
        weight = late.pinned.to(late.device, non_blocking=True)
        weight.add_(1)
        del weight
    late.bring()
    assert not rig.allocated(late.device)  # a copy that has not run does not count
    assert not rig.hazards()


def test_freed_memory_of_which_its_stream_waits_for_the_reader(late):
    weight = late.bring()
    late.compute.wait_stream(late.transfer)
    weight.sum()
    del weight
    late.transfer.wait_stream(late.compute)
    late.bring()
    assert not rig.hazards()


def test_the_other_device(late):
    other = late.pinned.to("cuda:0", non_blocking=True)
    assert (other.to(late.device) == 1).all()
    assert (other == 1).all()
    assert not rig.hazards()


def test_parts_of_one_memory(late):
    """One half travels while the other one is used."""
    buffer = torch.zeros(2 * SIZE, device=late.device)
    late.transfer.wait_stream(late.compute)
    with torch.cuda.stream(late.transfer):
        buffer[:SIZE].copy_(late.pinned, non_blocking=True)
    assert (buffer[SIZE:] == 0).all()
    late.pinned.numpy()
    assert not rig.hazards()


def test_views_read_nothing(late):
    weight = late.bring()
    views = (
        weight.view(10, 100).t()[1:],
        weight.detach(),
        torch.nn.Parameter(weight),
        torch.empty_like(weight),
    )
    result = torch.ones(SIZE, device=late.device).to("cpu", non_blocking=True)
    views += (result.view(10, 100)[1:], result.data, torch.zeros_like(result))
    module = torch.nn.Linear(1, 1)
    module.weight.data = weight
    assert len(views) == 7 and result.is_pinned()
    assert not rig.hazards()


def test_backward(late):
    """Autograd lets the streams of a backward pass wait for each other."""
    weight = late.bring().requires_grad_()
    late.compute.wait_stream(late.transfer)
    (weight * 2).sum().backward()
    assert (weight.grad == 2).all()
    assert not rig.hazards()


def test_lists_of_tensors(late):
    """As the moving average of diffusers' training copies its parameters."""
    targets = [torch.zeros(SIZE, device=late.device), torch.zeros(SIZE, device=late.device)]
    torch._foreach_copy_(targets, [late.pinned, late.pinned], non_blocking=True)
    assert all((target == 1).all() for target in targets)
    assert not rig.hazards()


def test_only_where_it_was_asked_for():
    require_rig()
    with rig.devices():
        program = Program()
        assert (program.bring() == 1).all()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        assert not rig.hazards()


@pytest.mark.skipif(bool(unmet("torch>=2.6")), reason="torch.accelerator came with torch 2.6")
def test_the_accelerator_interface(late):
    weight = late.bring()
    torch.accelerator.synchronize()
    assert (weight == 1).all()
    assert not rig.hazards()
