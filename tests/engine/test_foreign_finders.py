"""Other tools in the import system: whatever they do, the import works, and the target is patched."""

from __future__ import annotations

import textwrap
import zipfile

import pytest

from .harness import CORE

WRAPT = """
import wrapt
hooked = []
if hasattr(wrapt, "register_post_import_hook"):
    wrapt.register_post_import_hook(lambda module: hooked.append(module.f()), "lib.core")
"""

SEARCHER = """
import importlib.util, sys
class Searcher:  # asks everyone else, as coverage tools and debuggers do
    busy = False
    def find_spec(self, name, path=None, target=None):
        if self.busy:
            return None
        self.busy = True
        try:
            for finder in sys.meta_path:
                if finder is not self:
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        return spec
        finally:
            self.busy = False
"""

FINDERS = {
    "wrapt": WRAPT,
    "searcher": SEARCHER + "sys.meta_path.insert(0, Searcher())",
    "careless searcher": SEARCHER.replace("if self.busy", "if False").replace(
        "for finder in sys.meta_path:",
        "for finder in [f for f in sys.meta_path if type(f).__name__ != 'Searcher']:",
    )
    + "sys.meta_path.insert(0, Searcher())",
    "raises": """
import sys
class Raises:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("lib"):
            self.asked = True
        return None
    def __eq__(self, other):
        raise RuntimeError("compared")
sys.meta_path.append(Raises())
""",
    "same spec": """
import importlib.machinery, sys
class Cached:
    specs = {}
    def find_spec(self, name, path=None, target=None):
        if name not in self.specs:
            self.specs[name] = importlib.machinery.PathFinder.find_spec(name, path)
        return self.specs[name]
sys.meta_path.insert(-1, Cached())
""",
    "old finder": """
import sys
class Old:  # the protocol that ended with Python 3.11
    def find_module(self, name, path=None):
        return None
if sys.version_info < (3, 12):
    sys.meta_path.insert(0, Old())
""",
}


@pytest.mark.parametrize("name", FINDERS)
@pytest.mark.parametrize("order", ["before us", "after us"])
def test_finders_of_others(simple, name, order) -> None:
    finder, us = FINDERS[name], "import diffusers_quantfix"
    first, second = (finder, us) if order == "before us" else (us, finder)
    outcome = simple.run(
        f"{first}\n{second}\n"
        + textwrap.dedent("""
        import importlib, inspect
        import lib.core
        before = lib.core.f(), states("fix-f")
        importlib.reload(lib.core)
        again = lib.core.f(), states("fix-f")
        diffusers_quantfix.revert()
        tell(before=before, again=again, after=lib.core.f(),
             source="def f" in inspect.getsource(lib.core),
             loader=type(lib.core.__loader__).__name__, spec=type(lib.core.__spec__.loader).__name__)
    """)
    )
    assert outcome["before"] == ["patched", "applied"]
    assert outcome["again"] == ["patched", "applied"]
    assert outcome["after"] == "broken"
    assert outcome["source"]
    assert "Reporting" not in outcome["loader"] + outcome["spec"]
    assert not outcome.err


def test_a_finder_that_hides_the_target_from_us(simple) -> None:
    simple.library("lib2", core=CORE)
    simple.fix("fix-2", target="lib2.core", claims={"lib2": "<2"})
    outcome = simple.run("""
        import importlib.machinery, sys
        import diffusers_quantfix
        class Thief:
            def find_spec(self, name, path=None, target=None):
                return importlib.machinery.PathFinder.find_spec(name, path)
        sys.meta_path.insert(0, Thief())
        import lib.core
        unseen = lib.core.f(), states("fix-f"), reason("fix-f")
        sys.meta_path.pop(0)
        import lib2.core
        tell(unseen=unseen, swept=lib.core.f(), states=states("fix-f", "fix-2"))
    """)
    assert outcome["unseen"][0] == "broken"
    assert outcome["swept"] == "patched", "the next target sweeps"
    assert outcome["states"] == ["applied", "applied"]


def test_a_hidden_target_is_found_by_status(simple) -> None:
    outcome = simple.run("""
        import importlib.machinery, sys
        import diffusers_quantfix
        ours = [f for f in sys.meta_path if getattr(f, "__module__", "") == "diffusers_quantfix"]
        assert len(ours) == 1
        sys.meta_path[:] = [f for f in sys.meta_path if f not in ours] + ours
        import lib.core
        tell(before=lib.core.f(), state=diffusers_quantfix.status(load=False)["fix-f"].state, after=lib.core.f())
    """)
    assert outcome.told == {"before": "broken", "state": "applied", "after": "patched"}


def test_a_finder_that_breaks_breaks_its_own_import_only(simple) -> None:
    outcome = simple.run("""
        import sys
        import diffusers_quantfix
        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "lib.core":
                    raise ZeroDivisionError("theirs")
        sys.meta_path.insert(0, Broken())
        try:
            import lib.core
        except ZeroDivisionError as error:
            said = str(error)
        answer = diffusers_quantfix.status()["fix-f"]
        sys.meta_path.pop(0)
        import lib.core
        tell(said=said, state=answer.state, reason=answer.reason, f=lib.core.f())
    """)
    assert outcome.told == {
        "said": "theirs",
        "state": "waiting",
        "f": "patched",
        "reason": "lib is installed but cannot be imported: ZeroDivisionError: theirs",
    }


def test_lazy_loader(simple) -> None:
    """A module of LazyLoader is executed by the first question; none of our looks may be it."""
    simple.library("lib2", core=CORE)
    simple.fix("fix-2", target="lib2.core", claims={"lib2": "<2"})
    outcome = simple.run("""
        import importlib.util, sys
        def lazy(name):
            spec = importlib.util.find_spec(name)
            spec.loader = importlib.util.LazyLoader(spec.loader)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
        def asleep(module):
            return object.__getattribute__(module, "__dict__").get("f") is None
        early = lazy("lib.core")
        import diffusers_quantfix as qf
        looked = asleep(early)
        late = lazy("lib2.core")
        board = qf.status(load=False)
        looked = looked, asleep(early), asleep(late), [answer.state for answer in board]
        used = late.f(), type(late).__name__
        swept = asleep(early)  # late's arrival sweeps
        early.f
        qf.status()
        import inspect
        tell(looked=looked, used=used, swept=swept, early=early.f(), states=states("fix-f", "fix-2"),
             loader=type(late.__spec__.loader).__name__)
    """)
    assert outcome["looked"] == [True, True, True, ["waiting", "waiting"]]
    assert outcome["used"] == ["patched", "module"]
    assert outcome["swept"], "still asleep"
    assert outcome["early"] == "patched"
    assert outcome["states"] == ["applied", "applied"]
    assert outcome["loader"] == "SourceFileLoader"


def test_zip(world) -> None:
    with zipfile.ZipFile(world.site / "zipped.zip", "w") as archive:
        archive.writestr("lib/__init__.py", "")
        archive.writestr("lib/core.py", CORE)
        archive.writestr("lib/data.txt", "data")
        archive.writestr("lib-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n")
    world.fix()
    world.fix(
        "fix-lib",
        target="lib",
        body="def broken(lib): return 'fixed_in' not in vars(lib)\ndef patch(lib, ledger): lib.fixed_in = 1\n",
    )
    outcome = world.run("""
        import sys
        sys.path.insert(0, sys.path[1] + "/zipped.zip")
        import diffusers_quantfix, importlib, importlib.resources, inspect
        import lib.core
        before = lib.core.f()
        importlib.reload(lib.core)
        tell(before=before, again=lib.core.f(), state=states("fix-f"), loader=type(lib.__loader__).__name__,
             data=importlib.resources.files("lib").joinpath("data.txt").read_text(), source=inspect.getsource(lib.core))
    """)
    assert (outcome["before"], outcome["again"], outcome["state"]) == ("patched", "patched", "applied")
    assert (outcome["loader"], outcome["data"], outcome["source"].strip()) == (
        "zipimporter",
        "data",
        CORE.strip(),
    )


def test_namespace_package_and_builtin_and_extension(world) -> None:
    (world.site / "space").mkdir()
    world.distribution("space", "1.0")
    body = "def broken(m): return True\ndef patch(m, ledger): raise LookupError('seen ' + m.__name__)"
    for target in ("space", "_struct", "sys"):
        world.fix(f"fix-{target.strip('_')}", target=target, claims={"space": "<2"}, body=body)
    outcome = world.run("""
        import diffusers_quantfix as qf, _struct, space, struct
        tell(reasons=[answer.reason for answer in qf.status()], ok=struct.calcsize("i"))
    """)
    assert outcome["reasons"] == [
        f"could not be installed: LookupError: seen {name}" for name in ("space", "_struct", "sys")
    ]


def test_a_module_that_replaces_itself(world) -> None:
    core = """
        import sys
        class Stand:
            limit = 1
            def f(self):
                return "broken"
        stand = Stand()
        stand.__name__ = __name__
        sys.modules[__name__] = stand
    """
    world.library(core=core)
    world.fix()
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core
        import sys
        stand = sys.modules["lib.core"]
        first = stand.f(), states("fix-f")
        qf.revert()
        tell(first=first, after=stand.f(), left=sorted(vars(stand)))
    """)
    assert outcome.told == {"first": ["patched", "applied"], "after": "broken", "left": ["__name__"]}
