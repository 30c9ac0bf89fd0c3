"""Imports, revert, apply and reload in every order: after each step the library is what it should be."""

from __future__ import annotations

import itertools

import pytest

ACTIONS = ("target", "us", "revert", "apply", "reload target", "reload us")
NEEDS = {"revert": "us", "apply": "us", "reload us": "us", "reload target": "target"}

CORE = """
    def f():
        return "broken"

    def whole():
        return "broken"

    class Base:
        def inherited(self):
            return "broken"

    class Class(Base):
        @staticmethod
        def static():
            return "broken"

        @property
        def prop(self):
            return "broken"

    KEPT = [f, whole, vars(Class)["static"], vars(Class)["prop"]]
"""

FIX = """
    def broken(core):
        return core.f() == "broken"

    def patch(core, ledger):
        def make(original):
            return lambda *args: "patched" if original(*args) == "broken" else "patched twice"
        ledger.wrap_plain(core, "f", make)
        ledger.replace(core, "whole", lambda: "patched")
        ledger.wrap_plain(core.Class, "inherited", make)
        ledger.wrap_plain(core.Class, "static", make)
        ledger.wrap_plain(core.Class, "prop", lambda original: property(make(original.fget)))
"""

# What is patched, told from outside; `copy` is a module with `from lib.core import f`.  A copy from before a reload
# is not the function that stands in the module now: only work done on it while it was can be there and go.
SCRIPT = """
import importlib, importlib.metadata, logging, os, packaging.specifiers, pickle, sys

ORDERS = {orders!r}

def look(module):
    from_class = module.Class
    return [module.f(), module.whole(), from_class().inherited(), from_class.static(), from_class().prop]

def walk(order):
    core = user = None
    ours = gone = False
    core_age = copy_age = 0
    copy_patched = False
    for step, action in enumerate(order):
        if action == "target":
            core = importlib.import_module("lib.core")
        elif action == "copy":
            user = importlib.import_module("lib.user")
            core = sys.modules["lib.core"]
            copy_age, copy_patched = core_age, ours and not gone
        elif action == "us":
            ours = True
            import diffusers_quantfix
        elif action == "revert":
            gone = True
            diffusers_quantfix.revert()
        elif action == "apply":
            gone = False
            diffusers_quantfix.apply()
        elif action == "reload target":
            core = importlib.reload(core)
            core_age += 1
        elif action == "reload us":
            importlib.reload(diffusers_quantfix)
        if core is None:
            continue
        patched = ours and not gone
        if gone:
            copy_patched = False
        elif patched and copy_age == core_age:
            copy_patched = True
        where = f"{{order[:step + 1]}}: "
        if look(core) != ["patched" if patched else "broken"] * 5:
            return where + str(look(core))
        if user is not None and user.f() != ("patched" if copy_patched else "broken"):
            return where + "the copy is " + user.f()
        if not patched:
            stands = [core.f, core.whole, vars(core.Class)["static"], vars(core.Class)["prop"]]
            if any(one is not kept for one, kept in zip(stands, core.KEPT)) or "inherited" in vars(core.Class):
                return where + "not the original objects"
        if ours:
            state = diffusers_quantfix.status(load=False)["fix-all"].state
            if state != ("disabled" if gone else "applied"):
                return where + state
    return ""

faults = []
for order in ORDERS:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = walk(order)
        except BaseException as error:
            import traceback
            answer = str(order) + traceback.format_exc()
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    if answer:
        faults.append(answer)
tell(faults=faults[:5], number=len(faults))
"""


def orders() -> list[tuple[str, ...]]:
    """All orders in which nothing is reverted, applied or reloaded that was not imported."""
    return [
        order
        for order in itertools.permutations(ACTIONS)
        if all(order.index(needed) < order.index(action) for action, needed in NEEDS.items())
    ]


def orders_with_copies() -> list[tuple[str, ...]]:
    """All orders, with the copying module imported first of all, right after us, and right after the revert."""
    places = [lambda order: 0, lambda order: order.index("us") + 1, lambda order: order.index("revert") + 1]
    return [
        (*order[: place(order)], "copy", *order[place(order) :]) for order in orders() for place in places
    ]


def test_the_grid_is_complete() -> None:
    # 6! orders; "us" comes first among four of the actions in a quarter of them, "target" before its reload in half.
    assert len(set(orders())) == 720 // 4 // 2
    assert all(set(order) == set(ACTIONS) for order in orders())
    assert len(set(orders_with_copies())) == 3 * 90


@pytest.mark.long
def test_every_order(world) -> None:
    world.library(core=CORE, user="from lib.core import f")
    world.fix("fix-all", body=FIX)
    outcome = world.run(SCRIPT.format(orders=orders_with_copies()), timeout=120)
    assert outcome["number"] == 0, outcome["faults"]
