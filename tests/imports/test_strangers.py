"""Whatever a foreign finder on ``sys.meta_path`` is, an import of ours and of the libraries works as without us."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.conftest import simple, world  # noqa: F401  # fixtures

FINDERS = {
    "a class without a module": """
class Finder:
    def find_spec(self, name, path=None, target=None): return None
Finder.__module__ = None
""",
    "raises on every attribute": """
class Finder:
    def __getattr__(self, name): raise RuntimeError(name)
    def find_spec(self, name, path=None, target=None): return None
""",
    "lies about its class": """
class Finder:
    __class__ = property(lambda self: 1 / 0)
    def find_spec(self, name, path=None, target=None): return None
""",
    "says that it is ours": """
class Finder:
    __name__, __module__, woken = "_first_library", "diffusers_quantfix", False
    @property
    def wake(self): raise RuntimeError("asked")
    def find_spec(self, name, path=None, target=None): return None
""",
    "raises when it is compared": """
class Finder:
    def __eq__(self, other): raise RuntimeError("compared")
    __hash__ = None
    def find_spec(self, name, path=None, target=None): return None
""",
    "its class raises": """
class Meta(type):
    def __getattribute__(cls, name):
        raise RuntimeError(name)
class Finder(metaclass=Meta):
    def find_spec(self, name, path=None, target=None): return None
""",
    "has names that are no strings": """
class Name:
    def __eq__(self, other): raise RuntimeError("compared")
    def __str__(self): raise RuntimeError("printed")
    __hash__ = None
class Finder:
    def find_spec(self, name, path=None, target=None): return None
    __name__ = Name()
Finder.__module__ = Name()
""",
}


@pytest.mark.parametrize("settings", ["", "debug"])
@pytest.mark.parametrize("order", ["before us", "after us", "again"])
@pytest.mark.parametrize("name", FINDERS)
def test_a_strange_finder(simple, name, order, settings) -> None:  # noqa: F811
    put = f"import sys\n{FINDERS[name]}\nsys.meta_path.insert(0, Finder())\n"
    us = "import diffusers_quantfix\n"
    again = (
        "import diffusers_quantfix\nfor name in [n for n in sys.modules if n.startswith('diffusers_quantfix')"
        " and not n.startswith(('diffusers_quantfix.fixes', 'diffusers_quantfix.first'))]: del sys.modules[name]\n"
    )
    script = {"before us": put + us, "after us": us + put, "again": put + again + us}[order]
    outcome = simple.run(
        script
        + "import lib.core\ntell(f=lib.core.f(), state=diffusers_quantfix.status(load=False)['fix-f'].state)\n"
        + "diffusers_quantfix.revert()\ntell(reverted=lib.core.f())\n",
        settings,
    )
    assert (outcome["f"], outcome["state"]) == ("patched", "applied")
    assert outcome["reverted"] == "broken"


_MOCK = "from unittest import mock\nmock.patch"
METADATA = {
    "version raises": "metadata.version = lambda name: 1 / 0",
    "version is a mock": f"{_MOCK}('importlib.metadata.version').start()",
    "version is another": f"{_MOCK}('importlib.metadata.version', return_value='7').start()",
    "distribution is a mock": f"{_MOCK}('importlib.metadata.distribution').start()",
    "a finder raises": """
class Finder:
    def find_spec(self, name, path=None, target=None): return None
    def find_distributions(self, context): raise OSError("theirs")
sys.meta_path.insert(0, Finder())
""",
    "a distribution without a name, for every name": """
class Nameless(metadata.Distribution):
    def read_text(self, filename): return None
    def locate_file(self, path): return path
class Finder:
    def find_spec(self, name, path=None, target=None): return None
    def find_distributions(self, context): return [Nameless()]
sys.meta_path.insert(0, Finder())
""",
    "a version that is no string": """
class Finder:
    def find_spec(self, name, path=None, target=None): return None
    def find_distributions(self, context): return [type("Numbered", (), {"version": 7, "metadata": {"Name": "lib"}})()]
sys.meta_path.insert(0, Finder())
""",
}


@pytest.mark.parametrize("order", ["before us", "after us"])
@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_other_code_replaces(simple, name, order) -> None:  # noqa: F811
    """As the tests of a program do. Before: every fix failed, "lib states the version ''; reinstall lib"."""
    put, us = f"import sys\nfrom importlib import metadata\n{METADATA[name]}\n", "import diffusers_quantfix\n"
    outcome = simple.run(
        (put + us if order == "before us" else us + put)
        + "import lib.core\nboard = diffusers_quantfix.status(load=False)\n"
        + "tell(f=lib.core.f(), reason=board['fix-f'].reason, installed=board.installed['lib'])\n"
    )
    assert outcome.told == {"f": "patched", "reason": "patched here (lib 1.0)", "installed": "1.0"}
    assert not outcome.err


MODULES = {
    "raises on every attribute": """
class Module(types.ModuleType):
    def __getattribute__(self, name): raise RuntimeError(name)
sys.modules["stranger"] = sys.modules["lib_like"] = Module("stranger")
""",
    "its class and its spec raise": """
class Module:
    __class__ = property(lambda self: 1 / 0)
    __spec__ = property(lambda self: 1 / 0)
    __dict__ = property(lambda self: 1 / 0)
sys.modules["stranger"] = Module()
""",
    "no module, under names that are no strings": """
sys.modules[7] = 7
sys.modules[("a", "b")] = None
sys.modules["stranger"] = None
""",
    "a loader without attributes": """
import importlib.machinery
class Loader:
    __slots__ = ("real",)
    def create_module(self, spec): return self.real.create_module(spec)
    def exec_module(self, module): self.real.exec_module(module)
class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name.startswith("lib") else None
        if spec is not None:
            loader = Loader()
            loader.real, spec.loader = spec.loader, loader
        return spec
sys.meta_path.insert(0, Finder())
""",
    "a finder that takes itself away": """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if self in sys.meta_path: sys.meta_path.remove(self)
sys.meta_path.insert(0, Finder())
""",
    "entries of the path that are no strings": """
import pathlib
sys.path += [pathlib.Path("/nowhere"), None, b"bytes"]
""",
    "a hook of the path that raises": """
def hook(path): raise ImportError
sys.path_hooks.insert(0, hook)
""",
    "another __import__": """
import builtins
real = builtins.__import__
builtins.__import__ = lambda *args, **kwargs: real(*args, **kwargs)
""",
}


@pytest.mark.parametrize("order", ["before us", "after us"])
@pytest.mark.parametrize("name", MODULES)
def test_what_else_there_can_be(simple, name, order) -> None:  # noqa: F811
    put, us = f"import sys, types\n{MODULES[name]}\n", "import diffusers_quantfix\n"
    outcome = simple.run(
        (put + us if order == "before us" else us + put)
        + "import lib.core\ntell(f=lib.core.f(), state=diffusers_quantfix.status(load=False)['fix-f'].state)\n"
        + "diffusers_quantfix.revert()\ntell(reverted=lib.core.f())\n"
    )
    # One in front of us finds the library itself; or Python, whose list became shorter, passes over us. Then it is
    # patched by the next library, or by `status`.
    unseen = order == "after us" and name in (
        "a loader without attributes",
        "a finder that takes itself away",
    )
    assert outcome["f"] == ("broken" if unseen else "patched")
    assert (outcome["state"], outcome["reverted"]) == ("applied", "broken")


AT_THE_END = """
import sys
import diffusers_quantfix
class Service:
    def __del__(self):
        try:
            diffusers_quantfix.{name}
        except ImportError as error:
            print(sys.meta_path, error)
sys.modules["service"] = Service()
"""


@pytest.mark.parametrize("name", ["release", "status"])
def test_a_name_of_ours_that_is_used_first_at_the_end_of_the_interpreter(name) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END.format(name=name)], capture_output=True, text=True, timeout=120
    )
    said = f"None diffusers_quantfix.{name} was not used before the interpreter began to shut down"
    assert done.stdout.startswith(said), done.stderr


WITHIN = """
import sys
import diffusers_quantfix
said = []
def handler(event, arguments):
    if event == "exec" and arguments[0].co_filename.endswith({file!r}) and not said:
        said.append("began")
        try:
            diffusers_quantfix.status(load=False)
        except ImportError as error:
            said[:] = [str(error)]
        else:
            said[:] = ["status"]
sys.addaudithook(handler)
import lib.core
tell(said=said, f=lib.core.f(), state=diffusers_quantfix.status(load=False)['fix-f'].state)
"""


@pytest.mark.parametrize("file", ["activation.py", "watcher.py", "user_settings.py", "runner.py"])
def test_a_handler_that_asks_within_our_own_import(simple, file) -> None:  # noqa: F811
    """Before: a NameError, or an AttributeError about a circular import."""
    outcome = simple.run(WITHIN.format(file=file), "")
    assert (outcome["f"], outcome["state"]) == ("patched", "applied")
    assert len(outcome["said"]) == 1
    if file != "runner.py":
        assert "was interrupted, as by a signal handler" in outcome["said"][0]


RELOADED = """
import importlib, sys
import diffusers_quantfix
import lib.core
before = lib.core.f()
ours = [name for name in sys.modules if name.startswith("diffusers_quantfix")]
for name in sorted(name for name in ours if not name.startswith("diffusers_quantfix.fixes")):
    importlib.reload(sys.modules[name])
state = diffusers_quantfix.status(load=False)["fix-f"].state
diffusers_quantfix.revert()
tell(before=before, state=state, reverted=lib.core.f())
"""


def test_every_module_of_ours_reloaded(simple) -> None:  # noqa: F811
    """As IPython's deep reload. Before: the patches stayed, "healthy" on the board, and `revert` did not know them."""
    outcome = simple.run(RELOADED, "")
    assert (outcome["before"], outcome["state"], outcome["reverted"]) == ("patched", "applied", "broken")


RAISES = """
import logging
class Raises(logging.Handler):
    def emit(self, record):
        raise RuntimeError(record.getMessage())
logging.getLogger().addHandler(Raises())
logging.getLogger().setLevel(logging.DEBUG)
"""


@pytest.mark.parametrize("order", ["before us", "after us"])
def test_a_handler_that_raises_at_every_line(simple, order) -> None:  # noqa: F811
    """Before: a fix that was in place was called failed, and `status` raised."""
    simple.fix("fix-bad", body="def broken(module): raise OSError('asked')\ndef patch(module, draft): ...\n")
    us = "import diffusers_quantfix\n"
    outcome = simple.run(
        (RAISES + us if order == "before us" else us + RAISES)
        + "import lib.core\nboard = diffusers_quantfix.status(load=False)\n"
        + "tell(f=lib.core.f(), good=board['fix-f'].state, bad=board['fix-bad'].state)\n"
        + "diffusers_quantfix.revert()\ntell(reverted=lib.core.f())\n"
    )
    assert (outcome["f"], outcome["good"], outcome["bad"]) == ("patched", "applied", "failed")
    assert outcome["reverted"] == "broken"
