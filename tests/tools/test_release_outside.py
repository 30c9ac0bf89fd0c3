"""`release` and what else has a weight, outside of torch and in other threads: nothing is freed or changed under it."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import types

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory import ReleasedError
from tests import rig
from tests.marks import rest_is_long
from tests.time_limit import TimeIsUp, time_limit

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
    "object with the address": _Owner,
    "object with the address as a NumPy number": _NumPyOwner,
    "object with the address in ctypes": _CtypesOwner,
    "object with an interface": _Interface,
}


@pytest.mark.parametrize(
    "name",
    rest_is_long(_EXPORTERS, "numpy", "DLPack capsule", "part of the storage", "object with an interface"),
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
    assert report.survivors[0].holders
    del others


@pytest.mark.parametrize("name", ["numpy", "DLPack capsule"])
def test_what_was_left_goes_with_its_last_reader(name):
    pytest.importorskip("numpy")
    from torch.multiprocessing.reductions import StorageWeakRef

    model = _model()
    held = _EXPORTERS[name](model[0].weight)
    memory = StorageWeakRef(model[0].weight.untyped_storage())
    assert not qf.release(model).ok
    assert not memory.expired()
    del held
    assert memory.expired()


@pytest.mark.parametrize(
    "tool", ["release", "releasing", "audit", "track", "keep_host_copies", "dequantize_lora_layers"]
)
def test_no_object_is_kept_until_the_next_garbage_collection(tool):
    """Before: every object of the process, since the list of all objects was in itself."""
    from torch.multiprocessing.reductions import StorageWeakRef

    model, other = _model(), _model()
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in other.parameters()]
    reader = model[0].weight  # `release` searches for the holders of a survivor
    enabled = gc.isenabled()
    gc.disable()
    try:
        result = getattr(qf, tool)(model)
        if tool in ("releasing", "track"):
            with result:
                assert result is not None
        del other
        assert all(one.expired() for one in memory)
        memory = StorageWeakRef(reader.untyped_storage())
        del reader, model
        assert memory.expired()
    finally:
        if enabled:
            gc.enable()


def test_names_of_python_keep_what_they_name():
    """Before: all of these were emptied in place."""
    import torch

    model = _model()
    weight, wanted = model[0].weight, model[0].weight.detach().clone()
    cache = [weight, {"w": weight}, weight.detach(), weight[0], weight.untyped_storage(), (weight.data,)]
    optimizer = torch.optim.AdamW(model.parameters())
    loss = (weight.flatten() ** 2).sum() + weight.t().exp().sum()
    numbers = (part for part in [weight, weight])
    next(numbers)
    qf.release(model)
    assert all(
        torch.equal(value, wanted) for value in (weight, cache[1]["w"], cache[2], cache[5][0], next(numbers))
    )
    loss.backward()
    optimizer.step()
    assert not torch.equal(weight, wanted)


def test_what_suspended_functions_hold_is_theirs():
    """Before, up to Python 3.12: a generator in the traceback of an error was closed, and ended without one."""
    import asyncio

    class Sampler:
        def __init__(self, model) -> None:
            self.model, self.steps = model, iter(range(3))

        def images(self):
            for step in self.steps:
                yield step, self.model

        def fails(self):
            numbers, mine, model = self.images(), "a local of a method", self.model
            next(numbers)
            KEPT.append(numbers)
            raise ValueError(mine, model)

        async def later(self):
            await asyncio.sleep(0)
            return "done"

    model = _model()
    sampler = Sampler(model)
    try:
        sampler.fails()
    except ValueError as error:
        kept = error
    coroutine = sampler.later()
    qf.release(model)
    frame = kept.__traceback__.tb_next.tb_frame
    assert frame.f_locals["mine"] == "a local of a method"
    assert [step for step, _ in KEPT.pop()] == [1, 2]
    assert asyncio.run(coroutine) == "done"


KEPT: list = []


def test_mapped_and_shared_memory_goes_from_this_process(tmp_path):
    import torch

    file = tmp_path / "weights"
    file.write_bytes(b"\0" * 4 * SIZE * SIZE)
    model = _model()
    model[0].weight.data = torch.from_file(str(file), shared=True, size=SIZE * SIZE).view(SIZE, SIZE)
    model[1].share_memory()
    report = qf.release(model)
    assert report.ok, report


@pytest.mark.parametrize("kind", rest_is_long(["cuda.CUDAGraph", "xpu.XPUGraph"], "cuda.CUDAGraph"))
def test_a_captured_graph_keeps_the_memory_of_devices(gpu, kind):
    """The rig captures nothing: an object of the type, that says what a captured one says."""
    import torch

    module, _, name = kind.partition(".")
    if not hasattr(getattr(torch, module), name):
        pytest.skip(f"this torch has no torch.{kind}")

    class Captured(getattr(getattr(torch, module), name)):
        def __new__(cls):
            try:
                return object.__new__(cls)
            except TypeError:
                pytest.skip("a torch with CUDA makes one only where there is a GPU")

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
    if module != gpu.devices[0].type:
        assert report.ok, report  # a graph reads memory of its own kind of device
        return
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
    model = _model()
    GALLERY.images = _deep(model[0].weight.detach(), levels)
    rig.unfreeze_libraries()  # the gallery and this module are older than the model
    try:
        report = qf.release(model, search=60)
        (survivor,) = report.survivors
        assert f".images of a {_Gallery.__name__} <- global 'GALLERY' of {__name__}" in survivor.holders[0]
    finally:
        GALLERY.images = None


def test_a_search_that_is_cut_says_so():
    model = _model()
    GALLERY.images = _deep(model[0].weight.detach(), 30)
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


def _is_refused(result):
    """Whether a pass ended with an error of ours, or of a caller that finds a released layer without its weights."""
    return isinstance(result, (ReleasedError, AttributeError, KeyError)) or (
        isinstance(result, ValueError)
        and "(released)" in str(result)  # accelerate, if it had listed them before
    )


@pytest.mark.parametrize(
    "around", rest_is_long(["plain", "offloaded", "compiled", "wrapper"], "plain", "offloaded")
)
def test_a_forward_pass_of_another_thread_is_exact_or_refused(around):
    """Before, in some runs: torch's error about a weight that had been emptied, or a segmentation fault."""
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
    assert _is_refused(results[-1]), results[-1]
    if not report.ok:  # the traceback of the refused pass has a hook, and that all weights that are offloaded
        said = " ".join(str(report).split())  # in a large process the time for the search is up earlier
        assert "the traceback of an error" in said or "(search cut)" in said, said
        results[-1] = type(results[-1])()
        report = qf.release(model)
    assert report.ok, report
    assert all(torch.equal(result, wanted) for result in results[:-1])
    del others


def test_training_in_another_thread():
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    model, inputs = _wide(), torch.randn(64, WIDE)
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    busy = _Busy(lambda: model(inputs).sum().backward())
    qf.release(model, wait=120)
    results = busy.end()
    assert _is_refused(results[-1]), results[-1]
    assert set(results[:-1]) == {None}
    # The graph of the pass that was refused is in the traceback of its error.
    results.clear()
    gc.collect()
    assert all(one.expired() for one in memory)


def test_what_a_call_that_is_running_has_is_waited_for():
    import torch

    leave, entered = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(SIZE, SIZE))

        def forward(self, value):
            weight = self.weight
            entered.set()
            assert leave.wait(120)
            return value @ weight

    model, results = Slow(), []
    thread = threading.Thread(target=lambda: results.append(model(torch.ones(1, SIZE))), name="drawer")
    thread.start()
    assert entered.wait(60)
    assert [one.path for one in qf.release(model, wait=0.05).survivors] == ["Slow.weight"]
    threading.Timer(0.2, leave.set).start()
    thread.join(60)
    assert torch.equal(results[0], torch.full((1, SIZE), float(SIZE)))
    other, entered, leave = Slow(), threading.Event(), threading.Event()
    thread = threading.Thread(target=other, args=(torch.ones(1, SIZE),))
    thread.start()
    assert entered.wait(60)
    threading.Timer(0.2, leave.set).start()
    assert qf.release(other, wait=60).ok
    thread.join(60)


def test_what_a_call_has_computed_may_outlive_it_for_a_moment(monkeypatch):
    """Its output has the weights for the backward pass, and is dropped by a frame that is in no model any more."""
    import torch

    from diffusers_quantfix.memory import frames, freeing

    model = torch.nn.Linear(SIZE, SIZE)
    outputs = [model(torch.ones(1, SIZE))]
    answers = [True, False]

    def sleep(seconds):
        if not answers:
            outputs.clear()

    monkeypatch.setattr(frames, "in_a_model", lambda: answers.pop(0))
    monkeypatch.setattr(freeing, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert qf.release(model, wait=60).ok


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


def test_a_replica_with_the_same_weights_goes_on():
    """As DataParallel makes them on the first device: other modules, the same memory."""
    import torch

    class Replica(torch.nn.Module):
        def forward(self, value):
            return value @ self.weight

    model, replica = _model(), Replica()
    replica.__dict__["weight"] = model[0].weight.detach().view(SIZE, SIZE)
    assert [one.path for one in qf.release(model).survivors] == ["Sequential.0.weight"]
    assert torch.equal(replica(torch.ones(1, SIZE)), torch.full((1, SIZE), float(SIZE)))


def test_nothing_of_the_program_is_changed():
    """Before: the switch interval of the interpreter stayed 100 times as long after releases in several threads, and
    the garbage collector was off for a moment, in a fork for ever."""
    state = (
        sys.getswitchinterval(),
        gc.isenabled(),
        gc.get_threshold(),
        gc.get_freeze_count(),
        gc.get_debug(),
    )
    seen, ended = set(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.add((sys.getswitchinterval(), gc.isenabled()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    reports: list = []
    threads = [
        threading.Thread(
            target=lambda: reports.extend(qf.release(_model(), verify=one % 2) for one in range(4))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    ended.set()
    watcher.join(60)
    assert seen == {state[:2]}
    assert len(reports) == 16 and all(report.ok for report in reports), reports
    assert state[:3] == (sys.getswitchinterval(), gc.isenabled(), gc.get_threshold())
    assert gc.get_debug() == state[4]


@pytest.mark.long
def test_the_locals_of_a_running_function_are_not_touched():
    """Before, up to Python 3.12: a dict that locals() had given was overwritten, and a function that a tracer was
    looking at lost its variables (UnboundLocalError)."""
    ended, failed = threading.Event(), []

    def work() -> None:
        value = 1
        snapshot = locals()
        value = 2
        while not ended.is_set():
            pass
        if sys.version_info < (3, 13) and snapshot["value"] != 1:
            failed.append(f"value is {value}, locals() had {snapshot['value']}")

    def traced() -> None:
        sys.setprofile(lambda frame, event, argument: None)
        try:
            while not ended.is_set():
                one, other = 1, 2
                len((one, other))
        except BaseException as error:
            failed.append(error)
        finally:
            sys.setprofile(None)

    threads = [threading.Thread(target=work), threading.Thread(target=traced)]
    for thread in threads:
        thread.start()
    other = _model()
    KEPT.append(other[0].weight)
    try:
        for _ in range(5):
            qf.release(other)
    finally:
        KEPT.clear()
        ended.set()
    for thread in threads:
        thread.join(60)
    assert not failed


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


@pytest.mark.long
@pytest.mark.parametrize("times", [4, 10])
def test_a_tuple_that_another_thread_builds(times):
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
        for _ in range(times):
            Census()
            qf.release(_model())
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failed


AT_THE_END = """
import sys
import torch
from diffusers_quantfix import release
class Service:
    def __init__(self):
        self.model = torch.nn.Linear(2, 2)
    def __del__(self):
        print(sys.meta_path, release(self.model).freed)
release(Service().model)
sys.modules["service"] = Service()
"""


HEARD = """
import gc, sys, threading
from diffusers_quantfix.engine.heap import PLAIN, objects_of
sys.addaudithook(lambda event, arguments: None)  # as there was one after a torch.compile
sys.setswitchinterval(1e-6)
kept, ended, failed = [[] for _ in range(20_000)], threading.Event(), []
def build():
    while not ended.is_set():
        try:
            tuple(str(number) for number in range(2000))
        except SystemError as error:
            failed.append(error)
            return
threads = [threading.Thread(target=build) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    objects_of(gc.get_objects, but=PLAIN)
    objects_of(gc.get_referrers, kept)
ended.set()
for thread in threads:
    thread.join()
print(failed)
"""


def test_a_tuple_that_another_thread_builds_under_an_audit_hook():
    """`id` is an audited call: the hook ran between two looks at the objects, and so did other threads."""
    done = subprocess.run(
        [sys.executable, "-c", HEARD], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"


def test_a_destructor_at_the_end_of_the_interpreter():
    """Nothing can be imported there: it printed an ImportError."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "None {}", done.stderr
    assert "ImportError" not in done.stderr


def test_a_time_limit_of_the_program_is_heard(rig_devices):
    """Before: what it raised counted as a class that forbids subclasses."""
    from tests.rig import models

    pipeline = models.flux_pipeline()
    with time_limit() as over:

        def ends(frame, event, argument) -> None:
            if frame.f_code.co_name == "__init_subclass__":
                over()

        sys.setprofile(ends)
        try:
            with pytest.raises(TimeIsUp):
                qf.release(pipeline)
        finally:
            sys.setprofile(None)
    qf.release(pipeline, force=True)


def _registering_classes(kind: str, registry: dict) -> type:
    """A pipeline class whose subclasses register by name."""
    import abc

    class Registering(abc.ABCMeta if kind == "abc" else type):
        def __new__(metaclass, name, bases, body):
            made = super().__new__(metaclass, name, bases, body)
            registry[name] = made
            return made

        def __init__(cls, *args) -> None:
            registry[cls.__name__] = cls

    class Hook:
        def __init_subclass__(cls, **options) -> None:
            registry[cls.__name__] = cls

    class DiffusionPipeline(
        *([Hook] if kind == "hook" else []), **({} if kind == "hook" else {"metaclass": Registering})
    ):
        def __init__(self, net) -> None:
            self.net = net

        def __call__(self) -> str:
            return "ran"

    class Mine(DiffusionPipeline):
        pass

    assert registry["Mine"] is Mine
    return Mine


@pytest.mark.parametrize("kind", ["hook", "metaclass", "abc"])
def test_a_registry_of_classes_keeps_the_programs(kind) -> None:
    """Before: it got the class whose methods refuse, and each pipeline that the program made from then on refused."""
    registry: dict = {}
    cls = _registering_classes(kind, registry)
    pipe = cls(_model())
    qf.release(pipe)
    assert registry["Mine"] is cls
    assert registry["Mine"](_model())() == "ran"
    assert isinstance(pipe, cls)
    assert not isinstance(3, type(pipe))
    with pytest.raises(ReleasedError):
        pipe()


def test_a_components_manager_of_the_program_stays_as_it_is() -> None:
    """Before: the model was taken out of its dict, or AttributeError where an attribute has another meaning."""

    class ComponentsManager:
        def __init__(self, **attributes) -> None:
            vars(self).update(attributes)

    model, hooks = _model(), [object()]
    plain = ComponentsManager(components={"a": model})
    other = ComponentsManager(
        components={"a": model}, added_time=[1], collections={"all": ["a"]}, model_hooks=hooks
    )
    qf.release(model)
    assert plain.components == other.components == {"a": model}
    assert other.added_time == [1] and other.collections == {"all": ["a"]} and other.model_hooks is hooks


@pytest.mark.parametrize("others", [[1, object()], 3, {"a": 1}], ids=["list", "number", "dict"])
def test_hooks_of_the_program_on_what_is_kept_stay_as_they_are(others) -> None:
    """Before: AttributeError or TypeError in the middle of the release."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Own(hooks.ModelHook):
        @property
        def prev_module_hook(self):
            raise RuntimeError("the program's own")

    class DiffusionPipeline:
        def __init__(self, net) -> None:
            self.net = net

    model, hook = _model(), Own()
    hook.other_hooks = others
    hooks.add_hook_to_module(model, hook)
    first, second = DiffusionPipeline(model), DiffusionPipeline(model)
    assert [kept.component for kept in qf.release(first).kept] == ["net of DiffusionPipeline"]
    assert hook.other_hooks is others
    assert second.net(_model()[0].weight).shape == (SIZE, SIZE)


def test_a_release_after_an_interrupted_one_does_all_of_it() -> None:
    """Before: the pipeline ran on, hooks stayed, and layers raised AttributeError instead of `ReleasedError`.

    Interrupted where each function that changes something begins for the last time.
    """
    import torch

    accelerate = pytest.importorskip("accelerate")
    changing = tuple(f"diffusers_quantfix.memory.{name}" for name in ("guard", "unhooking", "emptying"))

    class DiffusionPipeline:
        def __init__(self, **components) -> None:
            vars(self).update(components)

        def __call__(self) -> None:
            pass

    def calls(stop_at: int) -> list[str]:
        """The functions that are called, up to that call, and what is left after a second release."""
        pipe = DiffusionPipeline(plain=_model(), offloaded=_model())
        accelerate.cpu_offload(pipe.offloaded, execution_device=torch.device("cpu"))
        models = [pipe.plain, pipe.offloaded]
        called: list[str] = []

        def handler(frame, event, argument) -> None:
            if event == "call" and frame.f_globals.get("__name__") in changing:
                called.append(frame.f_code.co_name)
                if len(called) == stop_at:
                    raise KeyboardInterrupt

        sys.setprofile(handler)
        try:
            qf.release(pipe, wait=0, verify=False)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not qf.release(pipe, wait=0, verify=False).survivors
        for use in (pipe, *models, *(layer for model in models for layer in model)):
            with pytest.raises(ReleasedError):
                use()
        left = [module for model in models for module in model.modules() if "_hf_hook" in vars(module)]
        assert not left, f"hooks stay after an interruption in {called[-1]}"
        return called

    calls(-1)  # which imports the modules
    of_all = calls(-1)
    last = {name: number for number, name in enumerate(of_all, 1)}
    assert {"guard_module", "guard_pipeline", "strip", "forget_in_managers", "give_up"} <= last.keys()
    for number in last.values():
        assert len(calls(number)) == number
