"""The verbs of the ledger on every kind of slot, and the way back: the very same objects stand there again."""

from __future__ import annotations

import copy
import functools
import inspect
import opcode
import pickle
import sys
import types
import typing

import pytest

from diffusers_quantfix.engine.draft import Draft
from diffusers_quantfix.engine.errors import ForeignPatch, TargetMissing
from diffusers_quantfix.engine.ledger import Ledger

CORE = """
import functools

def f(x: int, *, y: str = "y") -> tuple:
    "What f does."
    return ("f", x, y)

f.mark = "of f"

LIMIT = 5
partial = functools.partial(f, 1)

class Base:
    def inherited(self): return "inherited"
    @classmethod
    def made(cls, x=0): return ("made", cls.__name__, x)
    @staticmethod
    def free(x=0): return ("free", x)
    @property
    def prop(self): return "prop"
    @functools.cached_property
    def cached(self): return "cached"

class Class(Base):
    def method(self, x=0): return ("method", x)
    @classmethod
    def own_made(cls, x=0): return ("own_made", cls.__name__, x)
    @staticmethod
    def own_free(x=0): return ("own_free", x)
    @property
    def own_prop(self) -> str:
        "What own_prop is."
        return "own_prop"
    @own_prop.setter
    def own_prop(self, value: str) -> None: self.value = value
    @own_prop.deleter
    def own_prop(self) -> None: del self.value
    @functools.cached_property
    def kept(self) -> str:
        "Computed once."
        return "kept"
"""


@pytest.fixture
def core(monkeypatch):
    """A fresh module ``fakelib.core``, in the process itself."""
    package = types.ModuleType("fakelib")
    module = types.ModuleType("fakelib.core")
    monkeypatch.setitem(sys.modules, "fakelib", package)
    monkeypatch.setitem(sys.modules, "fakelib.core", module)
    exec(CORE, vars(module))
    return module


@pytest.fixture
def ledger():
    return Ledger({"fakelib"})


def write(ledger, verb, owner, name, *arguments, fix_id="fix") -> None:
    draft = ledger.draft(fix_id)
    getattr(draft, verb)(owner, name, *arguments)
    ledger.commit(draft)


def tagged(original):
    """A plain function around ``original``."""
    return lambda *args, **kwargs: ("ours", original(*args, **kwargs))


CALLS = {
    "method": lambda core: core.Class().method(3),
    "own_made": lambda core: core.Class.own_made(3),
    "own_free": lambda core: core.Class.own_free(3),
    "inherited": lambda core: core.Class().inherited(),
    "made": lambda core: core.Class().made(3),
    "free": lambda core: core.Class().free(3),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_of_every_kind(core, ledger, name) -> None:
    call = CALLS[name]
    before, slots = call(core), dict(vars(core.Class))
    write(ledger, "wrap_plain", core.Class, name, tagged)
    assert call(core) == ("ours", before)
    assert call(types.SimpleNamespace(Class=type("Sub", (core.Class,), {})))[0] == "ours"
    if name in ("inherited", "made", "free"):
        base = types.SimpleNamespace(Class=core.Base)
        assert call(base)[0] != "ours", "only the class that was named"
    assert ledger.undo("fix") == []
    assert call(core) == before
    assert dict(vars(core.Class)) == slots
    assert all(vars(core.Class)[key] is value for key, value in slots.items())


@pytest.mark.parametrize("name", ["own_prop", "prop"])
def test_properties(core, ledger, name) -> None:
    slots = dict(vars(core.Class))
    write(
        ledger,
        "wrap_plain",
        core.Class,
        name,
        lambda old: property(tagged(old.fget), old.fset, doc=old.__doc__),
    )
    assert getattr(core.Class(), name) == ("ours", name)
    ledger.undo("fix")
    assert getattr(core.Class(), name) == name
    assert dict(vars(core.Class)) == slots


def test_replace_any_kind_by_any_other(core, ledger) -> None:
    slots = dict(vars(core.Class))
    draft = ledger.draft("fix")
    draft.replace(core.Class, "method", property(lambda self: "now a property"))
    draft.replace(core.Class, "own_prop", lambda self: "now a method")
    draft.replace(core.Class, "own_made", staticmethod(lambda: "now static"))
    draft.replace(core.Class, "free", classmethod(lambda cls: cls.__name__))
    draft.replace(core.Base, "cached", property(lambda self: "computed"))
    draft.replace(core, "LIMIT", 6)
    draft.replace(core, "partial", None)
    assert dict(vars(core.Class)) == slots, "a draft writes nothing"
    ledger.commit(draft)
    one = core.Class()
    assert (one.method, one.own_prop(), one.own_made(), one.free()) == (
        "now a property",
        "now a method",
        "now static",
        "Class",
    )
    assert (one.cached, core.LIMIT, core.partial) == ("computed", 6, None)
    assert ledger.entries("fix")[0].where == "fakelib.core.Class.method"
    ledger.undo("fix")
    assert dict(vars(core.Class)) == slots
    assert (core.LIMIT, core.partial()) == (5, ("f", 1, "y"))


def test_one_more_base_class(core, ledger) -> None:
    base = type("Mixin", (), {"added": lambda self: "added", "method": lambda self: "of the mixin"})
    before, one, sub = core.Class.__bases__, core.Class(), type("Sub", (core.Class,), {})()
    draft = ledger.draft("fix")
    draft.inherit(core.Class, base)
    assert core.Class.__bases__ is before, "a draft writes nothing"
    ledger.commit(draft)
    assert core.Class.__bases__ == (core.Base, base)
    assert (one.added(), sub.added(), one.method()) == ("added", "added", ("method", 0))
    base.added = lambda self: "patched later"
    assert one.added() == "patched later"
    assert ledger.lost("fix") == []
    again = ledger.draft("fix")
    again.inherit(core.Class, base)
    ledger.commit(again)
    assert core.Class.__bases__ == (core.Base, base)
    core.Class.__bases__ = (*core.Class.__bases__, type("Theirs", (), {}))
    assert ledger.undo("fix"), "another tool has changed it"
    core.Class.__bases__ = (core.Base, base)
    ledger.recover()
    assert core.Class.__bases__ == (core.Base, base)


def test_a_base_class_is_taken_away(core, ledger) -> None:
    before = core.Class.__bases__
    draft = ledger.draft("fix")
    draft.inherit(core.Class, type("Mixin", (), {"added": lambda self: "added"}))
    ledger.commit(draft)
    assert ledger.undo("fix") == []
    assert core.Class.__bases__ == before and not hasattr(core.Class, "added")


def test_code_of_a_function(core, ledger) -> None:
    function, code = core.f, core.f.__code__
    write(
        ledger,
        "replace",
        core.f,
        "__code__",
        code.replace(co_consts=tuple("g" if c == "f" else c for c in code.co_consts)),
    )
    assert core.f is function
    assert core.f(1) == ("g", 1, "y")
    assert [entry.where for entry in ledger.entries("fix")] == ["fakelib.core.f.__code__"]
    assert ledger.lost("fix") == []
    ledger.undo("fix")
    assert core.f.__code__ is code


def test_an_instance_that_stands_for_a_module(core, ledger) -> None:
    one = core.Class()
    one.own = "own"
    draft = ledger.draft("fix")
    draft.replace(one, "own", "ours")
    draft.replace(one, "method", lambda: "ours")
    ledger.commit(draft)
    assert (one.own, one.method()) == ("ours", "ours")
    ledger.undo("fix")
    assert vars(one) == {"own": "own"}


def test_around_keeps_what_readers_and_tools_see(core, ledger) -> None:
    original = core.f
    write(ledger, "wrap_plain", core, "f", tagged)
    assert core.f is not original
    assert inspect.signature(core.f) == inspect.signature(original)
    assert inspect.unwrap(core.f) is original
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "mark"):
        assert getattr(core.f, name) == getattr(original, name), name
    assert type(core.f) is types.FunctionType
    # exec left the module without a file; pickle finds the function by name all the same.
    core.f.__module__ = "fakelib.core"
    assert pickle.loads(pickle.dumps(core.f)) is core.f
    write(ledger, "wrap_plain", core.Class, "own_free", tagged, fix_id="static")
    assert core.Class.own_free.__qualname__ == "Class.own_free"
    assert type(vars(core.Class)["own_free"]) is staticmethod
    write(ledger, "wrap_plain", core.Class, "own_made", tagged, fix_id="made")
    assert inspect.signature(core.Class.own_made) == inspect.signature(lambda x=0: x)
    assert core.Class.own_made.__name__ == "own_made"


def test_a_classmethod_is_pickled_and_copied_as_before(core, ledger) -> None:
    sub = type("Sub", (core.Class,), {"__module__": "fakelib.core"})
    core.Sub = sub
    before = [pickle.dumps(cls.own_made, protocol) for cls in (core.Class, sub) for protocol in range(6)]
    write(ledger, "wrap_plain", core.Class, "own_made", tagged)
    assert before == [
        pickle.dumps(cls.own_made, protocol) for cls in (core.Class, sub) for protocol in range(6)
    ]
    for made in (*map(pickle.loads, before), copy.copy(sub.own_made), copy.deepcopy(sub.own_made)):
        assert made(4)[0] == "ours"
        assert type(made) is types.MethodType
    assert core.Class.own_made.__func__(sub, 4) == ("ours", ("own_made", "Sub", 4)), "also past the binding"


@pytest.mark.parametrize("name", ["inherited", "made", "free"])
def test_what_is_inherited_is_named_as_its_owner(core, ledger, name) -> None:
    """Under the name of the base class pickle finds the base class's function, and refuses."""
    write(ledger, "wrap_plain", core.Class, name, tagged)
    value = getattr(core.Class, name)
    assert value.__qualname__ == f"Class.{name}"
    assert pickle.loads(pickle.dumps(value)) == value
    assert getattr(core.Base, name).__qualname__ == f"Base.{name}"


def test_a_copy_by_import_is_named_as_its_holder(core, ledger) -> None:
    """The copy alone is patched: ``write`` names the module that only imported the function."""
    user = types.ModuleType("fakelib.user")
    user.g, core.f.__module__ = core.f, "fakelib.core"
    sys.modules["fakelib.user"] = user
    try:
        write(ledger, "wrap_plain", user, "g", tagged)
        assert (user.g.__module__, user.g.__qualname__) == ("fakelib.user", "g")
        assert pickle.loads(pickle.dumps(user.g)) is user.g
    finally:
        del sys.modules["fakelib.user"]


def test_a_key_of_sys_modules_that_is_no_name(core, ledger, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, ("any", "object"), types.ModuleType("fakelib.user"))
    write(ledger, "wrap_plain", core, "f", tagged)
    assert ledger.undo("fix") == []


def test_a_property_looks_as_before(core, ledger) -> None:
    old = vars(core.Class)["own_prop"]
    write(
        ledger,
        "wrap_plain",
        core.Class,
        "own_prop",
        lambda old: property(tagged(old.fget), tagged(old.fset), tagged(old.fdel)),
    )
    new = vars(core.Class)["own_prop"]
    assert new.__doc__ == old.__doc__
    for accessor in ("fget", "fset", "fdel"):
        before, after = getattr(old, accessor), getattr(new, accessor)
        assert before is not after
        assert typing.get_type_hints(after) == typing.get_type_hints(before)
        assert inspect.signature(after) == inspect.signature(before)
        assert (after.__qualname__, after.__doc__) == (before.__qualname__, before.__doc__)


def test_a_cached_property_stays_one(core, ledger) -> None:
    write(ledger, "wrap_plain", core.Class, "kept", tagged)
    new, one = vars(core.Class)["kept"], core.Class()
    assert (type(new), new.__doc__) == (functools.cached_property, "Computed once.")
    assert one.kept == ("ours", "kept")
    assert one.kept is one.kept
    ledger.undo("fix")
    assert core.Class().kept == "kept"


def test_targets_that_are_not_there(core, ledger) -> None:
    draft = ledger.draft("fix")
    draft.replace(core, "f", print)
    for verb, argument in (("replace", 1), ("wrap_plain", tagged)):
        for owner in (core, core.Class, core.f):
            with pytest.raises(TargetMissing, match="has no gone"):
                getattr(draft, verb)(owner, "gone", argument)
    assert core.f(1) == ("f", 1, "y")


def test_two_writes_to_one_slot_stack(core, ledger) -> None:
    original = core.f
    draft = ledger.draft("fix")
    draft.wrap_plain(core, "f", tagged)
    draft.wrap_plain(core, "f", tagged)
    ledger.commit(draft)
    assert core.f(1) == ("ours", ("ours", ("f", 1, "y")))
    assert ledger.undo("fix") == []
    assert core.f is original


def test_two_fixes_on_one_slot_go_in_reverse(core, ledger) -> None:
    original = core.f
    write(ledger, "wrap_plain", core, "f", tagged, fix_id="below")
    write(ledger, "wrap_plain", core, "f", tagged, fix_id="above")
    assert ledger.overlap("below", "above")
    assert ledger.lost("below") == []
    (refusal,) = ledger.undo("below")
    assert refusal == "fakelib.core.f now holds the fix above, which must be removed first"
    assert (ledger.undo("above"), ledger.undo("below")) == ([], [])
    assert core.f is original


class Stubborn(type):
    def __setattr__(cls, name, value):
        super().__setattr__(name, value)
        if value == "refused":
            raise OSError("half written")


def test_a_failed_draft_leaves_nothing(core, ledger) -> None:
    stubborn = Stubborn("stubborn", (core.Base,), {"method": 1})
    user = types.ModuleType("fakelib.user")
    user.copied = core.f
    sys.modules["fakelib.user"] = user
    original = core.f
    try:
        draft = ledger.draft("fix")
        draft.wrap_plain(core, "f", tagged)
        draft.wrap_plain(core.Class, "inherited", tagged)
        draft.replace(stubborn, "inherited", "refused")
        with pytest.raises(OSError, match="half written"):
            ledger.commit(draft)
        assert user.copied is original
    finally:
        del sys.modules["fakelib.user"]
    assert core.f is original
    assert "inherited" not in vars(core.Class)
    assert "inherited" not in vars(stubborn)
    assert ledger.entries("fix") == []


def test_immutable_classes_refuse(core, ledger) -> None:
    draft = ledger.draft("fix")
    draft.wrap_plain(core, "f", tagged)
    draft.replace(dict, "get", None)
    with pytest.raises(TypeError, match="immutable type"):
        ledger.commit(draft)
    assert core.f(1) == ("f", 1, "y")


def test_installed_again_it_works_on_the_original(core, ledger) -> None:
    original, method = core.f, vars(core.Class)["method"]
    for _ in range(3):
        draft = ledger.draft("fix")
        draft.wrap_plain(core, "f", tagged)
        draft.wrap_plain(core.Class, "method", tagged)
        draft.wrap_plain(core.Class, "inherited", tagged)
        ledger.commit(draft)
        assert core.f(1) == ("ours", ("f", 1, "y")), "not around our own work"
        core.Class.method = method  # one of the slots is lost
        ledger.forget_lost("fix")
    assert ledger.undo("fix") == []
    assert core.f is original
    assert vars(core.Class)["method"] is method
    assert "inherited" not in vars(core.Class)


@pytest.mark.parametrize("name", ["f", "method"])
def test_on_demand(core, ledger, name) -> None:
    """Nothing until it is asked for, then as ``wrap_plain``; once asked for, at once ever after."""
    owner = core if name == "f" else core.Class
    original, limit = vars(owner)[name], core.LIMIT

    draft = ledger.draft("fix")
    draft.replace(core, "LIMIT", 6)
    write_now = draft.on_demand(owner, name, tagged)
    assert not write_now(), "the fix does not stand yet"
    ledger.commit(draft)
    assert vars(owner)[name] is original
    assert write_now()
    ours = vars(owner)[name]
    assert ours is not original
    assert write_now()
    assert vars(owner)[name] is ours, "once is enough"
    assert {entry.name for entry in ledger.entries("fix")} == {"LIMIT", name}
    assert ledger.undo("fix") == []
    assert (vars(owner)[name], core.LIMIT) == (original, limit)
    assert not write_now(), "the fix does not stand any more"
    assert vars(owner)[name] is original
    again = ledger.draft("fix")
    assert again.on_demand(owner, name, tagged)()
    ledger.commit(again)
    assert vars(owner)[name] is not original, "asked for once, it is written with the rest"


def test_on_demand_repairs_copies_and_other_fixes_stay(core, ledger, monkeypatch) -> None:
    other = types.ModuleType("fakelib.other")
    monkeypatch.setitem(sys.modules, "fakelib.other", other)
    other.copied = core.f
    draft = ledger.draft("fix")
    draft.replace(core, "LIMIT", 6)
    write_now = draft.on_demand(core, "f", tagged)
    ledger.commit(draft)
    write(
        ledger,
        "wrap_plain",
        core,
        "f",
        lambda original: lambda *args: ["theirs", original(*args)],
        fix_id="later",
    )
    assert other.copied is core.f
    assert write_now()
    assert other.copied is core.f
    assert core.f(1) == ("ours", ["theirs", ("f", 1, "y")]), "around what stands there when it is written"
    assert ledger.order == ["fix", "later"], "what is written later does not change who was installed later"


def test_a_demand_that_fails_breaks_nothing(core, ledger) -> None:
    """It comes in the middle of someone's call."""

    def fails(original):
        raise RuntimeError

    with pytest.raises(TargetMissing):
        ledger.draft("fix").on_demand(core, "absent", tagged)
    original = core.f
    draft = ledger.draft("fix")
    draft.replace(core, "LIMIT", 6)
    write_now = draft.on_demand(core, "f", fails)
    ledger.commit(draft)
    assert not write_now()
    assert core.f is original
    assert core.LIMIT == 6


def test_a_draft_needs_no_ledger(core) -> None:
    draft = Draft("fix")
    draft.replace(core, "f", print)
    assert [(entry.where, entry.old, entry.new) for entry in draft.entries] == [
        ("fakelib.core.f", core.f, print)
    ]


def test_foreign_class_in_a_slot_is_not_code(core, ledger) -> None:
    """Values, classes and partials of others are no patches; a function of others is one."""
    core.tool = functools.partial(print)
    core.kind = OSError
    core.call = lambda: 1
    draft = ledger.draft("fix")
    draft.replace(core, "kind", ValueError)
    draft.replace(core, "tool", print)
    with pytest.raises(
        ForeignPatch, match=r"fakelib.core.call was replaced by tests.engine.test_ledger before us"
    ):
        draft.replace(core, "call", print)


def test_the_name_of_what_answers_to_every_name():
    from diffusers_quantfix.engine.probe import name_of

    class NativeLibrary:
        def __getattr__(self, name):
            return print

    assert name_of(NativeLibrary()) == f"{__name__}.NativeLibrary"


def test_a_function_of_a_module_is_wrapped_by_wrapt_and_is_what_it_was_to_everybody(core, ledger) -> None:
    seen = []

    def spy(wrapped, instance, args, kwargs):
        seen.append((instance, args, kwargs))
        return ("ours", wrapped(*args, **kwargs))

    old, core.f.__module__ = core.f, "fakelib.core"
    before = [pickle.dumps(old, protocol) for protocol in range(6)]
    signature, source = inspect.signature(old), old.__code__
    draft = ledger.draft("fix")
    draft.wrap_wrapt(core, "f", spy)
    ledger.commit(draft)
    assert core.f(1, y=2)[0] == "ours"
    assert seen == [(None, (1,), {"y": 2})]
    assert [pickle.dumps(core.f, protocol) for protocol in range(6)] == before
    for again in (*map(pickle.loads, before), copy.copy(core.f), copy.deepcopy(core.f)):
        assert again is core.f
    assert (inspect.signature(core.f), core.f.__code__) == (signature, source)
    assert inspect.isfunction(core.f)
    ledger.undo("fix")
    assert core.f is old


@pytest.mark.parametrize("name", ["method", "own_made", "own_free", "own_prop"])
def test_what_is_no_function_of_a_module_is_not_wrapped_by_wrapt(core, ledger, name) -> None:
    with pytest.raises(
        TypeError, match=f"fakelib.core.Class.{name} is not a module's function: use wrap_plain"
    ):
        ledger.draft("fix").wrap_wrapt(core.Class, name, lambda *_: None)


def code_with(function, constant):
    code = function.__code__
    return code.replace(co_consts=(*code.co_consts, constant))


def test_two_fixes_on_the_code_of_one_function(core, ledger) -> None:
    before = core.f.__code__
    write(ledger, "replace", core.f, "__code__", code_with(core.f, "first"), fix_id="first")
    write(ledger, "replace", core.f, "__code__", code_with(core.f, "second"), fix_id="second")
    assert {"first", "second"} <= set(core.f.__code__.co_consts)
    assert ledger.lost("first") == [] and ledger.lost("second") == []
    ledger.forget_lost("first")
    assert ledger.overlap("first", "second")
    assert ledger.undo("first") == [
        "fakelib.core.f.__code__ now holds the fix second, which must be removed first"
    ]
    assert ledger.undo("second") == []
    assert "first" in core.f.__code__.co_consts and ledger.lost("first") == []
    assert ledger.undo("first") == [] and core.f.__code__ is before


def test_code_of_another_tool_over_two_fixes(core, ledger) -> None:
    write(ledger, "replace", core.f, "__code__", code_with(core.f, "first"), fix_id="first")
    write(ledger, "replace", core.f, "__code__", code_with(core.f, "second"), fix_id="second")
    core.f.__code__ = (lambda x: x).__code__
    assert len(ledger.lost("first")) == len(ledger.lost("second")) == 1


def padded(code):
    """The same code with instructions that do nothing, as line_profiler puts it there."""
    return code.replace(co_code=code.co_code + bytes([opcode.opmap["NOP"], 0]) * 3)


def test_a_profiler_of_lines_over_our_code(core, ledger) -> None:
    """After `apply` the fix was "healthy", and after `revert` our code stayed."""
    before = core.f.__code__
    write(ledger, "replace", core.f, "__code__", code_with(core.f, "ours"))
    ours = core.f.__code__
    core.f.__code__ = padded(ours)
    assert ledger.lost("fix") == [] and not ledger.is_executed_again("fix")
    (refusal,) = ledger.undo("fix")
    assert refusal.startswith("fakelib.core.f.__code__ now holds <code object f")
    core.f.__code__ = ours
    assert ledger.undo("fix") == [] and core.f.__code__ is before


@pytest.mark.parametrize("theirs", ["padded", "of another file inside"])
def test_upstreams_code_in_place_of_ours_is_not_ours(core, ledger, theirs) -> None:
    exec("def outer():\n    def inner(): return 'inner'\n    return inner", vars(core))
    code = core.outer.__code__
    consts = (
        getattr(const, "co_code", None) and const.replace(co_filename="ours.py") for const in code.co_consts
    )
    ours = code.replace(co_consts=tuple(new or old for new, old in zip(consts, code.co_consts, strict=True)))
    write(ledger, "replace", core.outer, "__code__", ours)
    core.outer.__code__ = padded(code) if theirs == "padded" else code.replace(co_name="outer")
    assert len(ledger.lost("fix")) == 1


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_tool_that_watches_the_code_watches_ours(core, ledger) -> None:
    exec("def outer():\n    def inner(): return 'inner'\n    return inner()", vars(core))
    code = core.outer.__code__
    (inner,) = [const for const in code.co_consts if hasattr(const, "co_code")]
    seen, tool, events = [], 4, sys.monitoring.events
    sys.monitoring.use_tool_id(tool, "of the program")
    try:
        sys.monitoring.register_callback(tool, events.PY_START, lambda code, _: seen.append(code.co_name))
        for one in (code, inner):
            sys.monitoring.set_local_events(tool, one, events.PY_START)
        ours = code.replace(
            co_consts=tuple(c.replace() if c is inner else c for c in code.co_consts), co_firstlineno=9
        )
        write(ledger, "replace", core.outer, "__code__", ours)
        assert core.outer() == "inner" and seen == ["outer", "inner"]
        assert sys.monitoring.get_local_events(3, ours) == 0
        sys.monitoring.set_local_events(tool, ours, events.PY_START | events.PY_RETURN)
        assert ledger.undo("fix") == [] and core.outer.__code__ is code
        assert sys.monitoring.get_local_events(tool, code) == events.PY_START | events.PY_RETURN
    finally:
        sys.monitoring.set_local_events(tool, code, 0)
        sys.monitoring.free_tool_id(tool)


def test_the_code_of_a_function_that_has_the_names_of_another(core, ledger) -> None:
    exec("class Model:\n    @functools.wraps(Class.method)\n    def to(self): return 'to'", vars(core))
    write(ledger, "replace", core.Model.to, "__code__", code_with(core.Model.to, "ours"))
    (entry,) = ledger.entries("fix")
    expected = "Model.to" if sys.version_info >= (3, 11) else "Class.method"
    assert entry.where == f"fakelib.core.{expected}.__code__"


def test_below_our_patches_is_what_the_library_had(core, ledger) -> None:
    upstream = core.f
    write(ledger, "wrap_plain", core, "f", tagged, fix_id="one")
    write(ledger, "wrap_plain", core, "f", tagged, fix_id="two")
    late = types.ModuleType("fakelib.late")
    late.copied = core.f  # imported after us
    assert ledger.below(core, "f", core.f) is upstream
    assert ledger.below(late, "copied", late.copied) is upstream
    assert ledger.below(late, "copied", upstream) is upstream
    assert ledger.below(core, "LIMIT", core.LIMIT) == 5
    assert ledger.undo("two") == []
    assert ledger.below(core, "f", core.f) is upstream
    assert ledger.undo("one") == []
    assert ledger.below(core, "f", core.f) is upstream


def test_a_constant_of_ours_is_no_other_slot(core, ledger) -> None:
    draft = ledger.draft("fix")
    draft.replace(core, "LIMIT", None)
    ledger.commit(draft)
    core.other = None
    assert ledger.below(core, "LIMIT", core.LIMIT) == 5
    assert ledger.below(core, "other", core.other) is None


@pytest.mark.parametrize(
    "held", ["by nothing else", "by another module", "under another name", "in a list", "wrapped"]
)
def test_modules_are_searched_for_copies_unless_the_slot_holds_the_only_reference(core, ledger, held) -> None:
    exec("def alone(): pass", vars(core))
    other = types.ModuleType("fakelib.other")
    if held == "by another module":
        other.copied = core.alone
    elif held == "under another name":
        core.also = core.alone
    elif held == "in a list":
        core.ALL = [core.alone]
    elif held == "wrapped":
        core.wrapper = functools.wraps(core.alone)(lambda: None)
    draft = ledger.draft("fix")
    draft.wrap_plain(core, "alone", tagged)
    assert [entry.only for entry in draft.entries] == [held == "by nothing else"]


@pytest.mark.parametrize("verb", ["replace", "the same slot twice", "a class"])
def test_what_may_have_copies_is_searched_for(core, ledger, verb) -> None:
    draft = ledger.draft("fix")
    if verb == "replace":
        draft.replace(core, "f", tagged)
    elif verb == "a class":
        draft.wrap_plain(core.Class, "method", tagged)
    else:
        draft.wrap_plain(core, "f", tagged)
        draft.wrap_plain(core, "f", tagged)
    assert [entry.only for entry in draft.entries] == [False]
