"""What a new release set decides about the claims of the fixes, and the edit of their declarations.

A claim ends at the newest release on which the defect was seen (``<=0.42.1``).  On a set with a newer release it is
extended where the defect is still there (``<=0.43.0``), and closed where it is gone (``<0.43.0``, and the release in
``fixed_in``).  What one set cannot decide is left to a person, with the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from diffusers_quantfix.advisories.ranges import last_seen
from diffusers_quantfix.fixes.targets import TARGETS

from .cells import Table, fits
from .verdict import HEALTHY

LINE_LENGTH = 110  # as in pyproject.toml, for code


@dataclass(frozen=True)
class Change:
    """One declaration that follows a new release.

    Attributes:
        fix_id: whose.
        claims: the parts that change: distribution -> new specifier.
        fixed_in: the release that fixes it; empty when the claim is extended.
    """

    fix_id: str
    claims: dict[str, str]
    fixed_in: str = ""

    @property
    def text(self) -> str:
        said = ", ".join(f"{name} {specifier}" for name, specifier in self.claims.items())
        return f"{said}, fixed in {self.fixed_in}" if self.fixed_in else said


def with_end(specifier: str, end: str) -> str:
    """An open claim with another end, ``<=0.43.0`` or ``<0.43.0``."""
    return ",".join(end if part.strip().startswith("<=") else part for part in specifier.split(","))


def decide(
    fix_id: str, said: Mapping[str, Any], found: Mapping[str, Any], pins: Mapping[str, str], table: Table
) -> tuple[Change | None, str]:
    """(the change that the set decides, why a person must decide); both empty when nothing is to be done.

    Args:
        fix_id: the fix.
        said: its declaration.
        found: what the run said of it: ``state``, ``probe``, ``patch``.
        pins: the releases of the set.
        table: the sets and releases that were known before.
    """
    claims = said["claims"]
    absent = [name for name in claims if name not in pins]
    outside = [
        name for name, specifier in claims.items() if name in pins and not fits({name: specifier}, pins)
    ]
    beyond = {
        name: pins[name]
        for name in outside
        if (last := last_seen(claims[name])) and Version(pins[name]) > Version(last)
    }
    if beyond and absent:
        return (
            None,
            f"not decided, the set has no {_and(absent)}; {_try(beyond, dict.fromkeys(absent, 'latest'))}",
        )
    if not beyond:
        if found["probe"] == "broken" and outside:
            return None, "the probe says broken outside of a claim that is closed: is the defect back?"
        return None, ""
    closed = [name for name in outside if name not in beyond]
    if closed:
        beside = {name: _last_inside(claims[name], table.releases.get(name, ())) for name in closed}
        return None, f"not decided, {_and(closed)} is outside of its claim too; {_try(beyond, beside)}"
    if found["probe"] == "broken":
        if found["patch"] != "ok":
            return None, f"the defect is still there, but the patch does not take: {found['patch']}"
        return Change(fix_id, {name: with_end(claims[name], f"<={pins[name]}") for name in beyond}), ""
    if found["state"] != HEALTHY:
        return None, f"not decided, no test of it could run here: {found['why']}"
    if said["fixed_in"]:
        partners = dict(part.split() for part in said["fixed_in"].split(" with "))
        beside = {
            name: _before(release, table.releases.get(name, ()))
            for name, release in partners.items()
            if name not in beyond
        }
        return None, f"healthy here, as it is since {said['fixed_in']}; {_try(beyond, beside)}"
    if len(beyond) > 1:
        return None, f"gone, but {_and(beyond)} are new at the same time; try them one by one"
    ((name, release),) = beyond.items()
    return Change(fix_id, {name: with_end(claims[name], f"<{release}")}, f"{name} {release}"), ""


def _try(new: Mapping[str, str], beside: Mapping[str, str]) -> str:
    words = " ".join(f"{name}={release}" for name, release in {**new, **beside}.items() if release)
    return f"try --add {words} --write"


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)


def _last_inside(specifier: str, releases: Iterable[str]) -> str:
    inside = [release for release in releases if fits({"": specifier}, {"": release})]
    return inside[-1] if inside else ""


def _before(release: str, releases: Iterable[str]) -> str:
    earlier = [one for one in releases if Version(one) < Version(release)]
    return earlier[-1] if earlier else ""


def source(fix_id: str, root: Path) -> Path:
    """The file of a fix."""
    return root / "diffusers_quantfix" / "fixes" / f"{TARGETS[fix_id].file.replace('.', '/')}.py"


def edited(text: str, change: Change) -> str:
    """The source of a fix with this change in its ``FIX`` declaration, and nothing else changed.

    Raises:
        ValueError: the declaration is not written with literals.
    """
    call = next(
        (
            node.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and [ast.unparse(target) for target in node.targets] == ["FIX"]
        ),
        None,
    )  # fmt: skip
    if call is None:
        raise ValueError("no FIX = Fix(...)")
    claims, fixed_in = _parts(call, change.fix_id)
    if not isinstance(claims, ast.Dict):
        raise ValueError("its claims are no dictionary that is written out")
    written = {
        ast.literal_eval(name): value for name, value in zip(claims.keys, claims.values, strict=True) if name
    }
    places: list[tuple[ast.expr, str]] = []
    for name, specifier in change.claims.items():
        if not isinstance(written.get(name), ast.Constant):
            raise ValueError(f"its claim on {name} is no string that is written out")
        places.append((written[name], f'"{specifier}"'))
    if change.fixed_in and fixed_in is not None:
        places.append((fixed_in, f'"{change.fixed_in}"'))
    lines = text.splitlines(keepends=True)
    if change.fixed_in and fixed_in is None:
        _insert(lines, claims, f'fixed_in="{change.fixed_in}"')
    # From the end, so that an edit does not move the places before it; all of them stand above what was inserted.
    for node, new in sorted(places, key=lambda place: (place[0].lineno, place[0].col_offset), reverse=True):
        if node.lineno != node.end_lineno:
            raise ValueError("a string that is to be changed stands on several lines")
        line = lines[node.lineno - 1].encode()
        lines[node.lineno - 1] = (
            line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
        ).decode()
    return "".join(lines)


def _parts(call: ast.Call, name: str) -> tuple[ast.expr | None, ast.expr | None]:
    """(its claims, its fixed_in) of one target in a declaration."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "targets" not in keywords:
        return keywords.get("claims"), keywords.get("fixed_in")
    for one in getattr(keywords["targets"], "elts", ()):
        if isinstance(one, ast.Call) and one.args and ast.unparse(one.args[0]) == repr(name):
            keywords = {keyword.arg: keyword.value for keyword in one.keywords}
            return keywords.get("claims", one.args[2] if len(one.args) > 2 else None), keywords.get(
                "fixed_in"
            )
    raise ValueError(f"no target {name} is written out")


def _insert(lines: list[str], claims: ast.expr, argument: str) -> None:
    """Add an argument to a declaration, after the claims of its target.

    Raises:
        ValueError: it has to stand in the line of the claims, which would become too long.
    """
    line = lines[claims.end_lineno - 1].encode()
    before, after = line[: claims.end_col_offset].decode(), line[claims.end_col_offset :].decode()
    apart = f",\n{before[: len(before) - len(before.lstrip())]}" if after.rstrip() == "," else ", "
    longer = f"{before}{apart}{argument}{after}"
    if max(map(len, longer.splitlines())) > LINE_LENGTH:
        raise ValueError(
            "there is no room behind its claims: write each argument of its target on its own line"
        )
    lines[claims.end_lineno - 1] = longer


def with_set(text: str, row: list[str], releases: Mapping[str, str]) -> str:
    """`cells.toml` with one more set, after the last one whose name begins alike, and with new releases.

    Args:
        text: the file.
        row: the lines of the set; none when it is there already.
        releases: distribution -> release that ``[releases]`` does not have yet.
    """
    for name, release in releases.items():
        head = f"\n{name} = [\n"
        before, found, rest = text.partition(head)
        if not found:
            raise ValueError(f"cells.toml has no [releases] of {name}")
        listed, _, after = rest.partition("\n]")
        *first, last = listed.split("\n")
        longer = f'{last} "{release}",'
        lines = [*first, longer] if len(longer) <= LINE_LENGTH else [*first, last, f'    "{release}",']
        text = f"{before}{head}" + "\n".join(lines) + f"\n]{after}"
    if not row:
        return text
    kind = row[1].partition('"')[2][0]
    blocks = text.rstrip("\n").split("\n\n")
    last = max(
        i for i, block in enumerate(blocks) if block.startswith("[[cell]]") and f'\nname = "{kind}' in block
    )
    blocks.insert(last + 1, "\n".join(row))
    return "\n\n".join(blocks) + "\n"


def with_ends(text: str, releases: Mapping[str, list[str]]) -> str:
    """The file of `advisories.supported` with the oldest and the newest of these releases, of each library in it."""
    for name, found in releases.items():
        text = re.sub(
            rf'(?m)^(    "{re.escape(name)}": )\(.*\),$', rf'\1("{found[0]}", "{found[-1]}"),', text
        )
    return text
