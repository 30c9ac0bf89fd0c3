"""Other tools that patch the same functions, before us and after us."""

from __future__ import annotations

import pytest

from .harness import CORE, PATCH, PROBE

TOOL = """
import functools
def closure(original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return original(*args, **kwargs)
    wrapper.calls = 0
    return wrapper

def secret(original):  # says nothing about what it calls
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)
    return wrapper

def partial(original):
    return functools.partial(original)

def proxy(original):
    import wrapt
    return wrapt.FunctionWrapper(original, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))

def instead(original):
    def f(x=0):
        return "broken"
    return f
"""

AROUND = PROBE + PATCH
REPLACE = (
    PROBE
    + """
def patch(module, ledger):
    def f(x=0):
        return "patched"
    ledger.replace(module, "f", f)
"""
)


@pytest.fixture
def tools(world):
    (world.site / "tool.py").write_text(TOOL)
    world.library(user="from lib.core import f", core=CORE + "def vouched(): pass\n")
    return world


@pytest.mark.parametrize("way", ["closure", "secret", "partial", "proxy"])
def test_we_go_over_a_wrapper_that_came_before_us(tools, way) -> None:
    tools.fix(body=AROUND)
    outcome = tools.run(f"""
        import lib.core, tool
        theirs = lib.core.f = tool.{way}(lib.core.f)
        import diffusers_quantfix as qf
        patched = lib.core.f(), states("fix-f"), getattr(theirs, "calls", 1) > 0
        qf.revert()
        tell(patched=patched, theirs=lib.core.f is theirs)
    """)
    assert outcome["patched"] == ["patched", "applied", True]
    assert outcome["theirs"]


@pytest.mark.parametrize("way", ["closure", "secret", "proxy", "instead"])
def test_a_replacement_refuses_to_drop_the_work_of_a_tool(tools, way) -> None:
    tools.fix(body=REPLACE)
    # The tool has replaced a second function: the two do not vouch for each other.
    outcome = tools.run(f"""
        import lib.core, tool
        theirs = lib.core.f = tool.{way}(lib.core.f)
        lib.core.vouched = tool.instead(None)
        import diffusers_quantfix
        tell(state=states("fix-f"), reason=reason("fix-f"), theirs=lib.core.f is theirs)
    """)
    assert (outcome["state"], outcome["theirs"]) == ("failed", True)
    assert outcome["reason"] == (
        "lib.core.f was replaced by tool before us; import diffusers_quantfix before it, or leave it as it is"
    )


@pytest.mark.parametrize(
    "decorated",
    [
        "from tool import closure\n@closure\ndef f(): return 'broken'",
        "import tool\n@tool.closure\ndef f(): return 'broken'",
        "from .compat import decorate\n@decorate\ndef f(): return 'broken'",
        "import contextlib\n@contextlib.contextmanager\ndef g(): yield\nf = g\ndef f(): return 'broken'",
        "from tool import instead\nf = instead(None)",
        "import functools\n@functools.lru_cache\ndef f(): return 'broken'",
    ],
)
def test_a_decorator_that_the_library_uses_is_not_foreign(world, decorated) -> None:
    (world.site / "tool.py").write_text(TOOL)
    world.library(core=decorated, compat="from tool import closure as decorate")
    world.fix(body=REPLACE)
    outcome = world.run("import lib.core, diffusers_quantfix; tell(state=states('fix-f'), f=lib.core.f())")
    assert outcome.told == {"state": "applied", "f": "patched"}


def test_methods_decorated_by_another_library_are_not_foreign(world) -> None:
    (world.site / "tool.py").write_text(TOOL)
    core = """
        import dataclasses, enum, tool
        def f(): return "broken"
        @dataclasses.dataclass
        class Data:
            x: int = 0
            @tool.closure
            def method(self): return "broken"
            @property
            def prop(self): return "broken"
    """
    body = """
        def broken(core):
            return core.Data().method() == "broken"
        def patch(core, ledger):
            for name in ("method", "__init__", "__repr__", "__eq__"):
                ledger.replace(core.Data, name, lambda self, *args: "patched" if args == () else None)
            ledger.replace(core.Data, "__init__", lambda self: None)
            ledger.replace(core.Data, "prop", property(lambda self: "patched"))
    """
    world.library(core=core)
    world.fix(body=body)
    outcome = world.run(
        "import lib.core, diffusers_quantfix as qf; tell(reason=reason('fix-f'), p=lib.core.Data().prop)"
    )
    assert outcome.told == {"reason": "patched here (lib 1.0)", "p": "patched"}


@pytest.mark.parametrize("way", ["closure", "secret", "partial", "proxy"])
@pytest.mark.parametrize("verb", [AROUND, REPLACE], ids=["around", "replace"])
def test_a_wrapper_over_us_keeps_us_until_it_is_gone(tools, way, verb) -> None:
    tools.fix(body=verb)
    outcome = tools.run(f"""
        import diffusers_quantfix as qf, lib.core, tool
        ours = lib.core.f
        theirs = lib.core.f = tool.{way}(ours)
        before = states("fix-f"), lib.core.f()
        qf.revert()
        during = states("fix-f"), lib.core.f(), lib.core.f is theirs, reason("fix-f")
        lib.core.f = ours
        qf.revert()
        tell(before=before, during=during, after=[states("fix-f"), lib.core.f is lib.core.KEPT[0]])
    """)
    assert outcome["before"] == ["applied", "patched"], "a wrapper that calls us is no harm"
    state, value, theirs, sentence = outcome["during"]
    assert (state, value, theirs) == ("overwritten", "patched", True)
    assert "cannot be removed: lib.core.f now holds" in sentence
    assert outcome["after"] == ["disabled", True]


@pytest.mark.parametrize(("way", "who"), [("closure", "tool"), ("secret", "tool"), ("proxy", "tool")])
def test_the_refusal_says_who_it_is(tools, way, who) -> None:
    tools.fix(body=AROUND)
    outcome = tools.run(f"""
        import diffusers_quantfix as qf, lib.core, tool
        lib.core.f = tool.{way}(lib.core.f)
        tell(reason=qf.revert()["fix-f"].reason)
    """)
    assert f"now holds code of {who};" in outcome["reason"]
    assert outcome["reason"] in outcome.err.replace("fix-f ", "")


def test_a_bound_fetch_of_our_method_counts_as_calling_us(world) -> None:
    core = """
        def f(): return "broken"
        class C:
            @classmethod
            def made(cls): return "broken"
            @staticmethod
            def free(): return "broken"
            @property
            def prop(self): return "broken"
    """
    body = """
        def broken(core): return core.C.made() == "broken"
        def patch(core, ledger):
            def make(original): return lambda *args: "patched" if original(*args) else 0
            ledger.wrap_plain(core.C, "made", make)
            ledger.wrap_plain(core.C, "free", make)
            ledger.wrap_plain(core.C, "prop", lambda original: property(make(original.fget)))
    """
    world.library(core=core)
    world.fix(body=body)
    outcome = world.run("""
        import diffusers_quantfix as qf
        from lib.core import C
        def tool(made, free, prop):
            C.made = classmethod(lambda cls: made())
            C.free = staticmethod(lambda: free())
            C.prop = property(lambda self: prop.fget(self))
        tool(C.made, C.free, vars(C)["prop"])
        tell(values=[C.made(), C.free(), C().prop], state=states("fix-f"), after=qf.revert()["fix-f"].state)
    """)
    assert outcome.told == {"values": ["patched"] * 3, "state": "applied", "after": "overwritten"}


def test_mock_patch_over_us(simple) -> None:
    outcome = simple.run("""
        from unittest import mock
        import diffusers_quantfix as qf, lib.core
        with mock.patch("lib.core.f") as fake:
            inside = states("fix-f"), qf.revert()["fix-f"].state
        tell(inside=inside, left=lib.core.f(), after=qf.revert()["fix-f"].state, f=lib.core.f())
    """)
    assert outcome.told == {
        "inside": ["overwritten", "overwritten"],
        "left": "patched",
        "after": "disabled",
        "f": "broken",
    }


def test_a_fix_below_one_that_cannot_be_removed_names_it(tools) -> None:
    """Else it would ask the user to remove a patch of ours."""
    tools.fix("fix-a", body=AROUND)
    over = """
        def broken(module): return module.f() == "patched" and module.vouched() is None
        def patch(module, ledger):
            ledger.wrap_plain(module, "f", lambda original: lambda *args: original(*args))
            ledger.wrap_plain(module, "vouched", lambda original: lambda: "patched")
    """
    tools.fix("fix-b", body=over)
    outcome = tools.run("""
        import lib.core, diffusers_quantfix as qf, tool
        applied = states("fix-a", "fix-b")
        lib.core.vouched = tool.closure(lib.core.vouched)
        qf.revert()
        tell(applied=applied, a=reason("fix-a"), b=reason("fix-b"))
    """)
    assert outcome["applied"] == ["applied", "applied"]
    assert "lib.core.vouched now holds code of tool" in outcome["b"]
    assert "lib.core.f now holds the fix fix-b, which must be removed first" in outcome["a"]


# Patches `f` over another fix's patch: found by what `f` returns.
OVER = """
def broken(module):
    return not module.f().endswith("twice")
def patch(module, ledger):
    def make(original):
        def f(x=0):
            return original(x) + " twice"
        return f
    ledger.wrap_plain(module, "f", make)
"""
BELOW = (PROBE + PATCH).replace('module.f() == "broken"', '"patched" not in module.f()')


WRAPT = (
    PROBE
    + """
def patch(module, ledger):
    ledger.wrap_wrapt(module, "f", lambda wrapped, instance, args, kwargs: "patched")
"""
)


def test_a_mock_and_an_older_wrapper_that_a_program_held(tools) -> None:
    """Wrapt's wrappers of one function are equal: with the first, what was known of the second was forgotten."""
    tools.fix(body=WRAPT)
    outcome = tools.run("""
        import gc
        import diffusers_quantfix as qf, lib.core
        held = lib.core.f
        qf.revert()
        qf.apply()
        del held
        gc.collect()
        before = lib.core.f
        qf.revert()
        lib.core.f = before  # as a mock that ends
        qf.revert()
        back = lib.core.f is lib.core.KEPT[0]
        qf.apply()
        qf.revert()
        tell(back=back, last=lib.core.f is lib.core.KEPT[0])
    """)
    assert outcome.told == {"back": True, "last": True}


@pytest.mark.parametrize("meanwhile", ["revert()", "revert('fix-f')", "apply()", "apply(); qf.revert()"])
@pytest.mark.parametrize("place", ["lib.core", "user"])
def test_a_mock_that_goes_after_a_revert_or_apply(tools, place, meanwhile) -> None:
    """pytest's monkeypatch puts our function back, which nothing could remove any more."""
    tools.fix(body=BELOW)
    tools.fix("fix-over", body=OVER)
    (tools.site / "lib" / "user.py").write_text("from .core import f\n")
    outcome = tools.run(f"""
        import lib.core, lib.user  # before us
        import diffusers_quantfix as qf
        place = lib.user if {place == "user"} else lib.core
        before, place.f = place.f, lambda x=0: "mocked"
        qf.{meanwhile}
        place.f = before
        qf.revert()
        back = [module.f is lib.core.KEPT[0] for module in (lib.core, lib.user)]
        qf.apply()
        again = [lib.core.f(), lib.user.f(), *states("fix-f", "fix-over")]
        qf.revert()
        last = [module.f is lib.core.KEPT[0] for module in (lib.core, lib.user)]
        tell(back=back, again=again, last=last)
    """)
    assert outcome["back"] == [True, True]
    assert outcome["again"] == ["patched twice", "patched twice", "applied", "applied"]
    assert outcome["last"] == [True, True]
