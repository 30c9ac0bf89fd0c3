"""`release`, `audit`, `track` and `keep_host_copies` among objects that answer nothing, lie, or are half made."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import types
import weakref

import pytest

import diffusers_quantfix as qf
from tests.marks import rest_is_long

KEPT: list = []


class Touched(Exception):
    """Code of an object ran that nobody asked for."""


def _touch(*args, **kwargs):
    raise Touched


SPECIAL = (
    *(
        "__eq__",
        "__ne__",
        "__hash__",
        "__getattr__",
        "__getattribute__",
        "__len__",
        "__bool__",
        "__repr__",
        "__str__",
    ),
    *(
        "__iter__",
        "__contains__",
        "__getitem__",
        "__index__",
        "__int__",
        "__float__",
        "__call__",
        "__format__",
    ),
    *(
        "__instancecheck__",
        "__subclasscheck__",
        "__subclasses__",
        "mro",
        "__dir__",
        "__sizeof__",
        "__reduce_ex__",
    ),
)


class Meta(type):
    """A class whose every answer is an error."""

    for _name in SPECIAL:
        if _name not in ("mro", "__call__"):
            locals()[_name] = _touch
    for _name in ("__name__", "__mro__", "__dict__", "__bases__", "__class__"):
        locals()[_name] = property(_touch)
    del _name


Meta.__module__ = property(_touch)


BODY = dict.fromkeys(SPECIAL, _touch) | {
    name: property(_touch)
    for name in ("__class__", "__dict__", "__doc__", "__module__", "__array_interface__")
}


def _hostile() -> list:
    import torch

    class Slots:
        __slots__ = ("weight",)

    class Empty:
        pass

    class Proxy(types.ModuleType):
        def __getattr__(self, name):
            raise Touched

    class Lying:
        __class__ = torch.nn.Linear

    class HostileModule(torch.nn.Linear):
        def __getattribute__(self, name):
            raise Touched

    class HalfMade(torch.nn.Module):
        def __init__(self) -> None:
            self.__dict__["_parameters"] = None

    class HostileTensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise Touched

        device = dtype = shape = property(_touch)
        untyped_storage = data_ptr = numel = __len__ = _touch

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (1 << 20,))

        __tensor_flatten__ = _touch

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise Touched

    class DiffusionPipeline:  # of this name only
        __slots__ = ()

    class ComponentsManager:
        def __init__(self) -> None:
            self.components = 3

    no_module = type("NoModule", (), {"__module__": None})
    gone = Empty()
    proxies = [weakref.proxy(gone), weakref.proxy(Empty)]
    del gone
    made = [
        type.__call__(type, "Hostile", (), BODY)(),
        type.__call__(Meta, "OfMeta", (), {}),
        object.__new__(type.__call__(Meta, "OfMeta", (), {})),
        object.__new__(type.__call__(Meta, "Both", (), BODY)),
        no_module(),
        Slots(),
        Proxy("lazy"),
        Lying(),
        *proxies,
        torch.ones(3).as_subclass(HostileTensor),
        Wrapper(),
        object.__new__(HostileModule),
        HostileModule.__new__(HostileModule),
        torch.nn.Module.__new__(torch.nn.Linear),
        HalfMade(),
        object.__new__(DiffusionPipeline),
        ComponentsManager(),
        object.__new__(ComponentsManager),
        (ctypes.c_float * 3)(),
        ctypes.c_void_p(12345),
        ctypes.POINTER(ctypes.c_float)(),
        iter(lambda: 1, 2),
    ]
    if "numpy" in sys.modules:
        import numpy

        memory = (ctypes.c_float * 8)()
        made.append(numpy.ctypeslib.as_array(ctypes.cast(memory, ctypes.POINTER(ctypes.c_float)), (8,)))
        made.append(memory)
    subclass = type("Items", (dict,), dict.fromkeys(("items", "values", "keys", "__iter__", "get"), _touch))
    made += [subclass(a=1), type("Row", (list,), {"__iter__": _touch, "__len__": _touch})([1])]
    return made


@pytest.fixture
def hostile():
    import numpy  # noqa: F401

    from tests import rig

    KEPT.extend(_hostile())
    rig.unfreeze_libraries()
    yield KEPT
    KEPT.clear()


def _model():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def test_no_tool_touches_or_trips_over_them(hostile):
    """Before: AttributeError in the middle of `release`, "'NoneType' object has no attribute 'partition'"."""
    import torch

    model = _model()
    with qf.track(model) as memory:
        qf.keep_host_copies(model)
        model(torch.ones(1, 8))
        qf.keep_host_copies(model, keep=False)
    assert memory.samples
    assert qf.audit(model).ok
    # Each refers to a weight, so that the search for holders meets it.
    weight = model[0].weight
    for value in hostile[:]:
        hostile.append([value, weight])
        hostile.append({"value": value, "weight": weight})
    del value
    report = qf.release(model)
    assert report.released == ("Sequential",)
    assert [survivor.path for survivor in report.survivors] == ["Sequential.0.weight"]
    assert report.survivors[0].holders
    str(report)


@pytest.mark.long
@pytest.mark.parametrize("place", ["attribute", "list", "dict"])
def test_in_the_model_itself(hostile, place):
    """What a user's module has among its attributes."""
    import torch

    for value in list(hostile):
        if type(value) is type or issubclass(type(value), (torch.nn.Module, torch.Tensor)):
            continue
        model = _model()
        held = {"attribute": value, "list": [value], "dict": {"key": value}}[place]
        model.__dict__["mine"] = held
        with qf.track(model):
            qf.audit(model)
            qf.keep_host_copies(model)
            assert qf.dequantize_lora_layers(model) == 0
            model.to(torch.float64)
            qf.keep_host_copies(model, keep=False)
        report = qf.release(model, verify=False)
        assert report.released == ("Sequential",) and report.ok, report


class Text(str):
    """A string that refuses to be written."""

    __str__ = __format__ = __repr__ = _touch  # type: ignore[assignment]


def _unflattened(model):
    """A wrapper that cannot be taken apart."""
    import torch

    wrapper = type("Wrapper", (torch.Tensor,), {"__tensor_flatten__": _touch})
    vars(model)["mine"] = torch.ones(2).as_subclass(wrapper)


def _with_odd_properties(model):
    import torch

    odd = type("Odd", (torch.Tensor,), {"is_cpu": property(_touch)})
    vars(model)["mine"] = torch.ones(2).as_subclass(odd)


def _with_an_odd_hook(model):
    hook = type("Hook", (), {"__getattr__": _touch})()
    vars(model)["_hf_hook"] = hook


@pytest.mark.parametrize("give", [_unflattened, _with_odd_properties, _with_an_odd_hook])
def test_parts_of_the_model_that_answer_nothing(give):
    model = _model()
    give(model)
    with qf.track(model):
        qf.audit(model)
    report = qf.release(model, verify=False)
    assert report.released == ("Sequential",)
    str(report)


def _suspended():
    def generator(held):
        yield held

    suspended = generator(KEPT)
    suspended.__qualname__ = Text("suspended")
    next(suspended)
    return suspended


def _pipeline(**attributes):
    """An object of a class of this name, as `release` knows pipelines, with a model of the same weights."""
    import torch

    made = type("DiffusionPipeline", (), {})()
    part = torch.nn.Sequential(torch.nn.Linear(2, 2))
    vars(part).update(attributes)
    vars(made).update(part=part, unet=torch.nn.Linear(2, 2))
    return made


LAWFUL = {
    "a key of 5000 digits": lambda weight: {10**5000: weight},
    "a class with another name": lambda weight: [type(Text("Named"), (), {})(), weight],
    "a suspended generator": lambda weight: [_suspended(), weight],
    "a pipeline without parameters": lambda weight: _pipeline(_parameters=None),
    "a pipeline without children": lambda weight: _pipeline(_modules=None),
    "a pipeline with a number for a child": lambda weight: _pipeline(_modules={"one": 1}),
    "a pipeline with a number for a name": lambda weight: [
        pipe := _pipeline(),
        vars(pipe).update({3: weight}),
    ],
}


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([*LAWFUL], id="all"),
        *(pytest.param([kind], id=kind, marks=pytest.mark.long) for kind in LAWFUL),
    ],
)
def test_odd_objects_elsewhere_in_the_process(kinds):
    """Before: the error of the object, some of them after the model was emptied."""
    model = _model()
    KEPT.extend(LAWFUL[kind](model[0].weight) for kind in kinds)
    try:
        report = qf.release(model)
    finally:
        KEPT.clear()
    assert report.released == ("Sequential",)
    str(report)


def test_odd_names_of_modules():
    name = Text("odd")
    sys.modules[name] = odd = types.ModuleType("odd")
    sys.modules[3] = odd  # type: ignore[index]
    model = _model()
    odd.weight = model[0].weight
    try:
        report = qf.release(model)
    finally:
        del sys.modules[name], sys.modules[3]  # type: ignore[arg-type]
    assert [survivor.path for survivor in report.survivors] == ["Sequential.0.weight"]
    str(report)


@pytest.mark.parametrize("place", rest_is_long(["module", "object", "dict"], "dict"))
def test_a_finalizer_that_adds_to_what_holds_a_weight(place):
    """Before, up to Python 3.11: RuntimeError "dictionary changed size during iteration", the report was lost."""
    big = types.ModuleType("big")
    owner, plain = types.SimpleNamespace(), {}
    held = {"module": vars(big), "object": vars(owner), "dict": plain}[place]
    held.update((f"name{i}", i) for i in range(3000))
    active = [True]

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if active:
                held[f"new{len(held)}"] = 1
                Garbage()

    for _ in range(20):
        Garbage()
    sys.modules["big"] = big
    model = _model()
    held["weight"] = model[0].weight
    try:
        report = qf.release(model, wait=0)
    finally:
        active.clear()
        del sys.modules["big"]
    assert report.released == ("Sequential",)


def test_a_thread_that_changes_the_classes_of_objects():
    """Before: KeyError, of a class that had no instance a moment before."""

    class State:
        pass

    kept, active = [State() for _ in range(50)], [True]

    def change():
        number = 0
        while active:
            number += 1
            kept[number % 50].__class__ = type("Next", (State,), {})

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            assert qf.release(_model(), verify=False, wait=0).released == ("Sequential",)
    finally:
        active.clear()
        thread.join()


@pytest.mark.parametrize("kind", ["partial method", "descriptor"])
def test_host_copies_of_a_model_whose_apply_is_no_function(kind):
    """Before: TypeError "the first argument must be callable" from ``.to()``."""
    import functools

    import torch

    class Descriptor:
        def __get__(self, model, cls=None):
            return self if model is None else functools.partial(torch.nn.Module._apply, model)

    class Model(torch.nn.Sequential):
        def _apply_with(self, extra, fn, recurse=True):
            return super()._apply(fn, recurse)

        _apply = functools.partialmethod(_apply_with, 1) if kind == "partial method" else Descriptor()

    model = Model(torch.nn.Linear(2, 2))
    qf.keep_host_copies(model)
    assert model.to(torch.float64)[0].weight.dtype == torch.float64
    qf.keep_host_copies(model, keep=False)


def test_a_model_whose_class_has_no_hash():
    import torch

    class Equal(type):
        def __eq__(cls, other):
            return cls is other

    class Model(torch.nn.Sequential, metaclass=Equal):
        pass

    model = Model(torch.nn.Linear(2, 2))
    vars(model)["other"] = Equal("Other", (), {})()
    with qf.track(model):
        assert qf.audit(model).ok
    qf.keep_host_copies(model)
    model.to(torch.float64)
    qf.keep_host_copies(model, keep=False)
    assert qf.release(model).released == ("Model",)


def test_a_model_that_looks_unknown_names_up_in_a_dictionary():
    """Its KeyError ended each of them; torch.nn.Module has the same in ``__getattr__``, but says AttributeError."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attributes = {}
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return vars(self)["attributes"][name]

    model = Model()
    assert qf.audit(model).ok
    with qf.track(model):
        model(torch.ones(1, 8))
    assert qf.release(model).released == ("Model",)


def test_a_lazy_module_stays_lazy(hostile):
    pytest.importorskip("transformers")
    from transformers.utils.import_utils import _LazyModule

    lazy = [module for module in list(sys.modules.values()) if type(module) is _LazyModule]
    assert lazy
    before = set(sys.modules)
    model = _model()
    model.__dict__["libraries"] = lazy
    KEPT.append(model[0].weight)
    qf.audit(model)
    with qf.track(model):
        pass
    qf.release(model)
    new = {name for name in set(sys.modules) - before if not name.startswith("diffusers_quantfix")}
    assert not {name for name in new if name.startswith(("transformers", "diffusers"))}, new


@pytest.mark.long
@pytest.mark.parametrize("times", [3, 6])
def test_objects_that_other_threads_make_at_this_moment(times):
    import torch

    ended, failed = threading.Event(), []

    def work(make) -> None:
        try:
            while not ended.is_set():
                make()
        except BaseException as error:
            failed.append(error)

    def modules() -> None:
        torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(10)))

    def classes() -> None:
        type("Made", (torch.nn.Linear,), {})(2, 2)

    def tuples() -> None:
        tuple(weight for _ in range(300))

    def grows() -> None:
        shared.__dict__[f"attribute{len(shared.__dict__)}"] = [weight]
        shared._modules[f"child{len(shared._modules)}"] = torch.nn.Linear(1, 1)
        if len(shared._modules) > 50:
            shared._modules.clear()

    class DiffusionPipeline:
        def __init__(self, model) -> None:
            self.model = model

    shared, weight = torch.nn.Module(), torch.nn.Parameter(torch.ones(4))
    user = DiffusionPipeline(shared)
    threads = [threading.Thread(target=work, args=(make,)) for make in (modules, classes, tuples, grows)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(times):
            model = _model()
            model.extra = weight
            assert qf.release(model, search=0.2).released
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not failed
    assert user.model is shared


def test_the_hint_of_an_error_that_answers_nothing():
    from diffusers_quantfix.advisories import crash

    importlib.reload(crash)
    error = type("Odd", (Exception,), {"__str__": _touch, "__repr__": _touch})()
    try:
        raise error
    except Exception as caught:
        assert isinstance(_safely(crash.hint, caught), str)


def _safely(hint, error) -> str:
    """As `uncaught` calls it: whatever it raises stays there."""
    try:
        return hint(error)
    except Exception:
        return ""


def test_a_long_error_does_not_hold_up_the_end_of_a_program(monkeypatch):
    """The first frames and the last words are searched."""
    from diffusers_quantfix.advisories import crash

    texts = []
    monkeypatch.setattr(crash, "search", lambda text, fixes: texts.append(text) or [])
    assert crash.hint(RuntimeError("first " + "words " * 100_000 + "last")) == ""
    (text,) = texts
    assert len(text) < 30_000
    assert "RuntimeError: first words" in text
    assert text.endswith("words last\n")


def test_an_error_that_lies_about_its_class(capsys):
    """Its hook has printed it; ours adds nothing."""
    from diffusers_quantfix import uncaught

    uncaught._print(type("Odd", (KeyboardInterrupt,), {"__class__": property(_touch)})())
    assert capsys.readouterr().err == ""
