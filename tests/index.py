"""The generated index of the fixes, `diffusers_quantfix/fixes/index.py`, from their declarations.

python -m tests.index --write     # also where it cannot be imported, as after a merge conflict
python -m tests.index --check     # non-zero exit when it is stale; `tests.upstream.tables` does both too
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from diffusers_quantfix.engine.fix import Fix, Target

ROOT = Path(__file__).resolve().parents[1]
FIXES = ROOT / "diffusers_quantfix" / "fixes"
INDEX = FIXES / "index.py"
WRITE = "python -m tests.index --write"
HEAD = f'''"""Every target of every fix, generated from the declarations by `{WRITE}`; do not edit.

A start of the package reads this file alone: the file of a fix is imported when one of its targets is, and may have the
bug there. One line per target, in the order of their names. Nothing but constants, so that it is read quickly.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

# of each target: name, module, claims, fixed in, fix, file
ROWS: tuple[tuple[str, str, tuple[tuple[str, str], ...], str, str, str], ...] = (
'''


def declared() -> dict[str, Fix]:
    """The file of each fix below the package of all fixes -> its declaration."""
    said = {}
    for path in sorted(FIXES.rglob("*.py")):
        file = ".".join(path.relative_to(FIXES).with_suffix("").parts)
        if path.name != "__init__.py" and file not in ("index", "targets"):
            said[file] = importlib.import_module(f"diffusers_quantfix.fixes.{file}").FIX
    return said


def text(said: dict[str, Fix] | None = None) -> str:
    """The index as it should be now.

    Raises:
        ValueError: two targets have the same name, or a fix with several targets has the name of one.
    """
    from diffusers_quantfix.advisories.supported import RELEASES, TORCH

    said = declared() if said is None else said
    names = [target.name for fix in said.values() for target in fix.targets]
    names += [fix.id for fix in said.values() if [target.name for target in fix.targets] != [fix.id]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"a name of a fix or of a target stands twice: {', '.join(twice)}")
    for file, fix in said.items():
        for target in fix.targets:
            target.file = file
    options = sorted(option for fix in said.values() for option in fix.options)
    tested = {"torch": TORCH[1], **{name: newest for name, (_, newest) in RELEASES.items()}}
    targets = (target for fix in said.values() for target in fix.targets)
    return rendered(sorted(targets, key=lambda target: target.name), options, tested)


def rendered(targets: Iterable[Target], options: Iterable[str], tested: Mapping[str, str]) -> str:
    """The index of these targets.

    Args:
        targets: with their file, in their order.
        options: of the fixes.
        tested: distribution -> the newest release that all fixes were tested with.
    """
    lines = [
        f"    {_literal((one.name, one.module, tuple(one.claims.items()), one.fixed_in, one.fix, one.file))},"
        for one in targets
    ]
    rest = [
        ")",
        "",
        "# What a user may choose in the environment variable beside the ids.",
        f"OPTIONS: tuple[str, ...] = {_literal(tuple(options))}",
        "",
        "# The newest release of each distribution that all fixes were tested with.",
        f"TESTED: dict[str, str] = {_literal(dict(tested))}",
    ]
    return HEAD + "\n".join([*lines, *rest]) + "\n"


def write() -> None:
    """Write the index."""
    INDEX.write_text(text(), encoding="utf-8")


def _literal(thing: object) -> str:
    if isinstance(thing, dict):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(value)}" for name, value in thing.items()) + "}"
    if isinstance(thing, tuple):
        return f"({', '.join(map(_literal, thing))}{',' * (len(thing) == 1)})"
    return json.dumps(thing, ensure_ascii=False)


def _without_the_index() -> None:
    """Let the fixes be imported although the index cannot be."""
    stand_in = ModuleType("diffusers_quantfix.fixes.index")
    vars(stand_in).update(ROWS=(), OPTIONS=(), TESTED={})
    sys.modules[stand_in.__name__] = stand_in


def main(arguments: list[str] | None = None) -> int:
    """Write or check the index; 1 when it is stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.index", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the index")
    what.add_argument("--check", action="store_true", help="report a stale index")
    options = parser.parse_args(arguments)
    _without_the_index()
    try:
        new = text()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.write:
        INDEX.write_text(new, encoding="utf-8")
        return 0
    if not INDEX.exists() or INDEX.read_text(encoding="utf-8") != new:
        print(f"error: {INDEX.name} is stale; run {WRITE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
