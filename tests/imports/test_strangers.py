"""Whatever a foreign finder on ``sys.meta_path`` is, an import of ours and of the libraries works as without us."""

from __future__ import annotations

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
    # importlib.metadata asks every finder, too, and raises what it raises: then no version can be read.
    unreadable = name == "raises on every attribute"
    assert (outcome["f"], outcome["state"]) == (
        ("broken", "failed") if unreadable else ("patched", "applied")
    )
    assert outcome["reverted"] == "broken"
