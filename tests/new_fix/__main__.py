"""The command: ``python -m tests.new_fix --help``."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from .files import INDEX_FILE, MARK, to_fill_in
from .removal import remove
from .stubs import LIBRARIES, Draft, start


def _claims(words: list[str], distribution: str) -> dict[str, str]:
    if words:
        return {(one := Requirement(word)).name: _in_order(str(one.specifier)) for word in words}
    try:
        return {distribution: f"<={metadata.version(distribution)}"}
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{distribution} is not installed: name the affected releases with --claims"
        ) from None


def _in_order(specifier: str) -> str:
    """The lower bound first."""
    return ",".join(sorted(specifier.split(","), key=lambda part: "<" in part)) if specifier else ""


def main(arguments: list[str] | None = None) -> int:
    """Start a fix; 2 when what is asked for is not possible."""
    parser = argparse.ArgumentParser(prog="python -m tests.new_fix", description="Starts a new fix.")
    parser.add_argument("id", help="library and words: diffusers-group-offload-bnb")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", metavar="MODULE", help="start a fix: the module whose import triggers it")
    what.add_argument("--remove", action="store_true", help="take the fix out everywhere")
    parser.add_argument("--title", default=f"{MARK}: the defect in one line", help="the defect in one line")
    parser.add_argument(
        "--symptom", default=f"{MARK}: the error text", help="the error text, as one would search it"
    )
    parser.add_argument(
        "--claims", nargs="+", default=[], metavar="RANGE",
        help="the affected releases, as in 'diffusers>=0.31.0,<=0.42.1'; the last is the newest on which the defect "
        "was seen (default: up to what is installed)",
    )  # fmt: skip
    parser.add_argument("--upstream", nargs="+", default=[], metavar="URL", help="issues and pull requests")
    asked = parser.parse_args(arguments)
    if asked.remove:
        return _remove(asked.id)
    try:
        distribution = LIBRARIES.get(asked.id.partition("-")[0], ("", "", ""))[2]
        claims = _claims(asked.claims, distribution) if distribution else {}
        new = Draft(
            asked.id, asked.target, asked.title.rstrip("."), asked.symptom, claims, tuple(asked.upstream)
        )
        names = start(new)
    except (ValueError, InvalidRequirement) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("written:", *names, sep="\n  ")
    print("to fill in:", *to_fill_in([name for name in names if name != INDEX_FILE]), sep="\n  ")
    print("the steps: the docstring of diffusers_quantfix/fixes/__init__.py")
    return 0


def _remove(fix_id: str) -> int:
    try:
        changed, left = remove(fix_id)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("changed or deleted:", *changed, sep="\n  ")
    if left:
        print("still named, for you to decide:", *left, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
