"""The targets of all fixes, and access to a fix's file."""

from __future__ import annotations

import os
from importlib import import_module

from ..engine.fix import Fix, Target, declared
from . import FIXES, NAMES
from .index import ROWS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

PACKAGES = {"optimum-quanto": "optimum"}  # the distributions whose package has a different name
PROVED_CODE = os.path.join(
    os.path.dirname(__file__), "proved_code.json"
)  # see `diffusers_quantfix.engine.proofs`

TARGETS: dict[str, Target] = {row[0]: Target(*row) for row in ROWS}


def fix_module(name: str) -> ModuleType:
    """The module of a fix, by its id or the name of one of its targets; no other file of a fix is imported."""
    return import_module(f"{__package__}.{TARGETS[NAMES[name][0]].file}")


def declaration(name: str) -> Fix:
    """The declaration of a fix, by its id or the name of one of its targets."""
    return declared(fix_module(name))


def declarations() -> list[Fix]:
    """Every declaration, in the order of the ids."""
    return [declaration(fix_id) for fix_id in sorted(FIXES)]
