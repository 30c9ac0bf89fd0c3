"""`release` and what reads a weight's memory from outside of torch, and in other threads: nothing is freed under it."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory import InUseError, ReleasedError
from tests import rig
from tests.marks import rest_is_long

SIZE = 16


def _model():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
    torch.nn.init.ones_(model[0].weight)
    return model


def _overwrite() -> list:
    """Take whatever memory was freed, and fill it."""
    import torch

    return [torch.full((SIZE, SIZE), 7.0) for _ in range(200)]


def _slice(weight):
    import torch

    half = weight.untyped_storage()[: SIZE * 4]
    return torch.empty(0).set_(half, 0, (SIZE,), (1,))


def _of_ctypes(weight):
    return (ctypes.c_float * SIZE * SIZE).from_address(weight.data_ptr())


def _pointer(weight):
    return ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))


class _Owner:
    """As Numba keeps memory of others: an address, and the tensor so that it stays."""

    def __init__(self, weight) -> None:
        self.owner, self.pointer = weight, weight.data_ptr()

    def read(self) -> float:
        return (ctypes.c_float).from_address(int(getattr(self.pointer, "value", self.pointer))).value


class _NumPyOwner(_Owner):
    def __init__(self, weight) -> None:
        import numpy

        self.owner, self.pointer = weight, numpy.uint64(weight.data_ptr())


class _CtypesOwner(_Owner):
    def __init__(self, weight) -> None:
        self.owner, self.pointer = weight, ctypes.c_void_p(weight.data_ptr())


class _Interface(_Owner):
    """The interface of NumPy as an attribute, not as a property of the class."""

    def __init__(self, weight) -> None:
        self.owner, self.__array_interface__ = weight, dict(weight.detach().numpy().__array_interface__)

    def read(self) -> float:
        import numpy

        return float(numpy.array(self)[0, 0])


def _imported(name):
    def make(weight):
        import numpy
        import torch

        return {
            "numpy": lambda: weight.detach().numpy(),
            "numpy of .data": lambda: weight.data.numpy(),
            "a view in numpy": lambda: weight.detach().numpy()[2:4],
            "memoryview": lambda: memoryview(weight.detach().numpy()),
            "numpy.from_dlpack": lambda: numpy.from_dlpack(weight.detach()),
            "torch.from_dlpack": lambda: torch.from_dlpack(weight.detach()),
            "torch.from_numpy": lambda: torch.from_numpy(weight.detach().numpy()),
            "DLPack capsule": lambda: torch.utils.dlpack.to_dlpack(weight.detach()),
            "versioned capsule": lambda: weight.detach().__dlpack__(max_version=(1, 0)),
        }[name]()

    return make


def _first(held) -> float:
    import torch

    if type(held).__name__ == "PyCapsule":
        held = torch.utils.dlpack.from_dlpack(held)
    if isinstance(held, _Owner):
        return held.read()
    while not isinstance(held, float):
        held = held[0] if not isinstance(held, memoryview) else held[0, 0]
        held = float(held) if getattr(held, "ndim", 1) == 0 else held
    return held


_EXPORTERS = {
    **{
        name: _imported(name)
        for name in (
            *("numpy", "numpy of .data", "a view in numpy", "memoryview", "numpy.from_dlpack"),
            *("torch.from_dlpack", "torch.from_numpy", "DLPack capsule", "versioned capsule"),
        )
    },
    "part of the storage": _slice,
    "ctypes array": _of_ctypes,
    "ctypes pointer": _pointer,
    "object with the address": _Owner,
    "object with the address as a NumPy number": _NumPyOwner,
    "object with the address in ctypes": _CtypesOwner,
    "object with an interface": _Interface,
}


@pytest.mark.parametrize(
    "name", rest_is_long(_EXPORTERS, "numpy", "DLPack capsule", "ctypes pointer", "object with an interface")
)
def test_what_reads_a_weight_from_outside_goes_on_reading_it(name):
    """Before: the array read whatever was put there next, -1.08e14 for one, and the report said "freed"."""
    pytest.importorskip("numpy")
    model = _model()
    held = _EXPORTERS[name](model[0].weight)
    whole = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    report = qf.release(model, search=60)
    others = _overwrite()
    assert _first(held) == 1.0
    assert [survivor.path for survivor in report.survivors] == ["Sequential.0.weight"]
    assert report.freed["cpu"] + report.survivors[0].bytes == whole
    assert "survivor: Sequential.0.weight" in str(report)
    assert "local 'held' of test_what_reads" in str(report).replace("\n        ", " ") or name in (
        "ctypes pointer",
        "part of the storage",
    )
    del others


@pytest.mark.parametrize("name", ["numpy", "DLPack capsule", "ctypes array"])
def test_what_was_left_goes_with_the_next_release(name):
    """Before: the first report said that all was freed, and it had been freed under the array."""
    pytest.importorskip("numpy")
    model = _model()
    weight = model[0].weight
    held = _EXPORTERS[name](weight)
    assert not qf.release(model).ok
    del held
    report = qf.release(model)
    assert report.ok
    assert report.released == ()
    assert weight.numel() == 0


def test_names_of_python_are_not_from_outside():
    import torch

    model = _model()
    weight = model[0].weight
    cache = [weight, {"w": weight}, weight.detach(), weight[0], weight.untyped_storage(), (weight.data,)]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    loss = (weight.flatten() ** 2).sum() + weight.t().exp().sum()
    numbers = (part for part in [weight, weight])
    next(numbers)
    report = qf.release(model)
    assert report.ok, report
    assert all(value.numel() == 0 for value in (weight, cache[2], cache[3], cache[5][0]))
    with pytest.raises(RuntimeError):
        loss.backward()


def test_an_inference_tensor_is_emptied_not_left_without_memory():
    import torch

    with torch.inference_mode():
        model = _model()
        alias = model[0].weight.view(-1)
    assert qf.release(model).ok
    assert alias.numel() == 0


def test_mapped_and_shared_memory_goes_from_this_process(tmp_path):
    import torch

    file = tmp_path / "weights"
    file.write_bytes(b"\0" * 4 * SIZE * SIZE)
    model = _model()
    model[0].weight.data = torch.from_file(str(file), shared=True, size=SIZE * SIZE).view(SIZE, SIZE)
    model[1].share_memory()
    report = qf.release(model)
    assert report.ok, report
    assert model[0].weight.numel() == model[1].weight.numel() == 0


@pytest.mark.parametrize("kind", rest_is_long(["cuda.CUDAGraph", "xpu.XPUGraph"], "cuda.CUDAGraph"))
def test_a_captured_graph_keeps_the_memory_of_devices(gpu, kind):
    """The rig captures nothing: an object of the type, that says what a captured one says."""
    import torch

    module, _, name = kind.partition(".")
    if not hasattr(getattr(torch, module), name):
        pytest.skip(f"this torch has no torch.{kind}")

    class Captured(getattr(getattr(torch, module), name)):
        def __new__(cls):
            return object.__new__(cls)

        def __init__(self) -> None:
            self.done = False

        def pool(self):
            if self.done:
                raise RuntimeError("pool() without a preceding successful capture")
            return (0, 1)

        def reset(self) -> None:
            self.done = True

    graph = Captured()
    model = _model().to(gpu.devices[0])
    report = qf.release(model)
    assert len(report.survivors) == 4
    assert "a captured graph may read it" in report.survivors[0].reason
    graph.reset()
    assert qf.release(model).ok


def _deep(value, levels: int):
    for _ in range(levels):
        value = {"0": value}
    return value


class _Gallery:
    def __init__(self, images) -> None:
        self.images = images


GALLERY = _Gallery(None)


@pytest.mark.parametrize("levels", rest_is_long([1, 7, 30], 7))
def test_a_holder_is_followed_up_to_its_owner(levels):
    """Before: nothing survived, and a chain ended at seven levels at the latest."""
    pytest.importorskip("numpy")
    model = _model()
    GALLERY.images = _deep(model[0].weight.detach().numpy(), levels)
    rig.bring_the_libraries_back()  # the gallery and this module are older than the model
    try:
        report = qf.release(model, search=60)
        (survivor,) = report.survivors
        assert "NumPy array float32[16, 16]" in survivor.holders[0]
        assert f".images of a {_Gallery.__name__} <- global 'GALLERY' of {__name__}" in survivor.holders[0]
    finally:
        GALLERY.images = None


def test_a_search_that_is_cut_says_so():
    pytest.importorskip("numpy")
    model = _model()
    GALLERY.images = _deep(model[0].weight.detach().numpy(), 30)
    try:
        (survivor,) = qf.release(model, search=0.0).survivors
        assert survivor.holders[0].endswith("(search cut)"), survivor
    finally:
        GALLERY.images = None


class _Busy:
    """A thread that calls ``call`` again and again."""

    def __init__(self, call) -> None:
        self.results: list = []
        self._call = call
        self._stop = False
        began = threading.Event()

        def work() -> None:
            while not self._stop:
                began.set()
                try:
                    self.results.append(self._call())
                except BaseException as error:
                    self.results.append(error)
                    return

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        assert began.wait(60)
        while not self.results and self.thread.is_alive():
            time.sleep(0.001)

    def end(self) -> list:
        """What all calls gave, once one that began after now has ended: without it the thread may not have run."""
        until, count = time.monotonic() + 60, len(self.results) + 2
        while self.thread.is_alive() and len(self.results) < count and time.monotonic() < until:
            time.sleep(0.001)
        self._stop = True
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.results


WIDE = 1024  # so that the thread is nearly always inside of a layer


def _wide():
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(WIDE, WIDE) for _ in range(20)])


@pytest.mark.parametrize("around", ["plain", "offloaded", "compiled", "wrapper"])
def test_a_forward_pass_of_another_thread_finishes_exactly_or_is_refused(around):
    """Before, in most runs: torch's error about a weight that had been emptied, AttributeError of a hook that was
    gone, and with larger inputs a segmentation fault in one of three."""
    import torch

    torch.manual_seed(0)
    model, inputs = _wide(), torch.randn(64, WIDE)
    with torch.no_grad():
        wanted = model(inputs)
    call = model
    if around == "offloaded":
        pytest.importorskip("accelerate").cpu_offload(model, torch.device("cpu"))
    elif around == "compiled":
        call = torch.compile(model, backend="eager")
    elif around == "wrapper":

        class Wrapper(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, value):
                return self.inner(value)

        call = Wrapper()

    def run():
        with torch.no_grad():
            return call(inputs)

    busy = _Busy(run)
    report = qf.release(model, wait=120)
    others = _overwrite()
    results = busy.end()
    assert report.ok, report
    assert isinstance(results[-1], ReleasedError), results[-1]
    assert all(torch.equal(result, wanted) for result in results[:-1])
    del others


def test_training_in_another_thread():
    """A backward pass has no function of Python in it. Before: "The size of tensor a (0) must match ..."."""
    import torch

    model, inputs = _wide(), torch.randn(64, WIDE)
    busy = _Busy(lambda: model(inputs).sum().backward())
    report = qf.release(model, wait=120)
    results = busy.end()
    assert report.ok, report
    assert isinstance(results[-1], ReleasedError), results[-1]
    assert set(results[:-1]) == {None}


def test_a_thread_that_does_not_leave_ends_in_a_refusal_that_changes_nothing():
    import torch

    leave, entered = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(SIZE, SIZE)

        def forward(self, value):
            entered.set()
            assert leave.wait(120)
            return self.layer(value)

    model = Slow()
    before = dict(vars(model))
    results: list = []
    thread = threading.Thread(target=lambda: results.append(model(torch.ones(1, SIZE))), name="drawer")
    thread.start()
    assert entered.wait(60)
    with pytest.raises(
        InUseError, match=r"nothing was released: thread 'drawer' is inside a Slow .*wait=SECONDS"
    ):
        qf.release(model, wait=0.05)
    assert vars(model) == before
    leave.set()
    thread.join(60)
    assert torch.equal(results[0], model(torch.ones(1, SIZE)))
    assert qf.release(model).ok


def test_an_idle_thread_that_has_the_model_is_not_waited_for():
    model, stop = _model(), threading.Event()

    def work(mine) -> None:
        stop.wait(120)
        del mine

    thread = threading.Thread(target=work, args=(model,))
    thread.start()
    try:
        assert qf.release(model, wait=0).ok
    finally:
        stop.set()
        thread.join(60)


def test_a_replica_with_the_same_weights_is_noticed():
    """As DataParallel makes them on the first device: other modules, the same memory."""
    import torch

    leave, entered = threading.Event(), threading.Event()

    class Replica(torch.nn.Module):
        def forward(self, value):
            entered.set()
            assert leave.wait(120)
            return value @ self.weight

    model, replica = _model(), Replica()
    replica.__dict__["weight"] = model[0].weight.detach().view(SIZE, SIZE)
    thread = threading.Thread(target=replica, args=(torch.ones(1, SIZE),))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(InUseError, match="inside a Replica with the same weights"):
        qf.release(model, wait=0.05)
    leave.set()
    thread.join(60)
    assert qf.release(model).ok


def test_unreachable_objects_do_not_hold_a_component():
    """A dead pipeline that nobody has collected yet is no user."""
    import torch

    class DiffusionPipeline:
        def __init__(self, model) -> None:
            self.model = model
            self.me = self

    model = torch.nn.Linear(SIZE, SIZE)
    gc.disable()
    try:
        for _ in range(3):
            DiffusionPipeline(model)
        report = qf.release(model)
    finally:
        gc.enable()
    assert report.released == ("Linear",)
    assert report.ok


def test_a_complex_view_whose_base_was_emptied():
    """Its node is made anew from the base, which fails by then; what cannot be freed is told."""
    import torch

    model = _model()
    view = torch.view_as_complex(model[0].weight.view(SIZE, SIZE // 2, 2))
    report = qf.release(model)
    # Its autograd metadata keeps the view in between, and says so to nobody.
    assert [survivor.path for survivor in report.survivors] in ([], ["Sequential.0.weight"])
    assert report.freed
    del view


def test_a_tuple_that_another_thread_builds():
    """``tuple(generator)`` there failed with SystemError: the look at all objects had the half-built one too."""
    from diffusers_quantfix.memory.census import Census

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    ended, failed = threading.Event(), []

    def build():
        while not ended.is_set():
            try:
                tuple(str(number) for number in range(2000))  # grows, so that it is resized many times
            except SystemError as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            Census()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failed
