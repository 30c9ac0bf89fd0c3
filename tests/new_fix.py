"""Starts a new fix: ``python -m tests.new_fix ID --target MODULE``; takes one out again: ``--remove ID``.

Writes the fix, its test, its case of `verify` and its line of the changelog as stubs, and the generated index.
What is given on the command line is written wherever it belongs, so nothing has to be typed twice.  Every place that is
left is marked FILL IN; until the last one is gone the tests fail and name it.

``--remove`` deletes the fix, its test and its cases, its lines in the changelog, in errors.txt, in the results and in
the generated files, and prints every other place that names it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from inspect import signature
from itertools import pairwise
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from diffusers_quantfix import __version__
from diffusers_quantfix.engine.fix import Fix, Target
from diffusers_quantfix.fixes import FIXES, NAMES, OPTIONS, TESTED
from diffusers_quantfix.fixes.targets import TARGETS
from tests import index

ROOT = Path(__file__).resolve().parents[1]
MARK = "FILL IN"
INDEX_FILE, CHANGELOG = "diffusers_quantfix/fixes/index.py", "CHANGELOG.md"
ERRORS, RESULTS = "tests/tools/errors.txt", "tests/upstream/results.json"
PAGES = ("diffusers_quantfix/FIXES.md", "diffusers_quantfix/COMPATIBILITY.md")
# first word of an id -> (folder of its fixes, module that its targets lie in, distribution)
LIBRARIES = {
    "accelerate": ("accelerate", "accelerate", "accelerate"),
    "bnb": ("bitsandbytes", "bitsandbytes", "bitsandbytes"),
    "diffusers": ("diffusers", "diffusers", "diffusers"),
    "peft": ("peft", "peft", "peft"),
    "quanto": ("quanto", "optimum.quanto", "optimum-quanto"),
    "torch": ("torch", "torch", "torch"),
    "torchao": ("torchao", "torchao", "torchao"),
    "transformers": ("transformers", "transformers", "transformers"),
}
WIDTH = 120


@dataclass(frozen=True)
class Draft:
    """What is known of the defect when its fix is started."""

    id: str
    target: str
    title: str
    symptom: str
    claims: Mapping[str, str]
    upstream: tuple[str, ...]

    @property
    def library(self) -> tuple[str, str, str]:
        return LIBRARIES[self.id.partition("-")[0]]

    @property
    def name(self) -> str:
        """``eight_bit_move`` for ``diffusers-8bit-move``."""
        words = self.id.partition("-")[2].replace("8bit", "eight-bit").replace("4bit", "four-bit")
        return words.replace("-", "_")

    @property
    def fix(self) -> str:
        return f"diffusers_quantfix/fixes/{self.library[0]}/{self.name}.py"

    @property
    def test(self) -> str:
        return f"tests/fixes/test_{self.id.replace('-', '_')}.py"

    @property
    def case(self) -> str:
        return f"diffusers_quantfix/verify/cases/{self.id.replace('-', '_')}.py"


def files_of(fix_id: str) -> list[str]:
    """The files of a fix that a person writes, but for the changelog."""
    name = fix_id.replace("-", "_")
    file = f"diffusers_quantfix/fixes/{TARGETS[fix_id].file.replace('.', '/')}.py"
    return [file, f"tests/fixes/test_{name}.py", f"diffusers_quantfix/verify/cases/{name}.py"]


def to_fill_in(names: list[str], root: Path = ROOT) -> list[str]:
    """The places that are still stubs, as ``FILE:LINE: what is missing``."""
    places = []
    for name in names:
        path = root / name
        for number, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), 1):
            if MARK in line:
                places.append(f"{name}:{number}: {line.strip()}")
    return places


def fix_stub(new: Draft) -> str:
    """The file of the fix."""
    said = {
        "Symptom": new.symptom,
        "Cause": f"{MARK}: which lines of upstream do what.",
        "Upstream": f"{', '.join(new.upstream)}." if new.upstream else "not reported.",
        "Patch": f"{MARK}: what is replaced, and why there.",
    }
    paragraphs = "\n".join(
        textwrap.fill(
            f"{word}: {text}", WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for word, text in said.items()
    )
    claims = f"    claims={_quoted(dict(new.claims))},"
    if not any(">" in specifier for specifier in new.claims.values()):
        claims = f"    # {MARK}: the first affected release too\n{claims}"
    argument = new.target.rpartition(".")[2]
    # the release of this package that brings it, where a declaration says that
    since = f"    since={_quoted(__version__)},\n" if "since" in signature(Fix).parameters else ""
    return f'''"""{new.title[0].upper()}{new.title[1:]}.

{paragraphs}
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix

FIX = Fix(
    __doc__,
    id="{new.id}",
    module="{new.target}",
{claims}
    # {MARK}: "wrong result", "error", "memory or time" or "other"
    harm="error",
    # {MARK}: regular expressions that find the message of the error in a text; none where nothing is raised
    patterns=(),
    # {MARK}: what tells it from other bugs with this message: words, or file.py:function of a traceback
    frames=(),
{since})


def broken({argument}: ModuleType) -> bool:
    """{MARK}: how the probe knows the defect: behaviour of a small stand-in first, source text last (engine.probe)."""
    raise NotImplementedError("{MARK}: broken() of {new.id}")


def patch({argument}: ModuleType, draft: Draft) -> None:
    """{MARK}: write through the draft (replace, wrap_plain); delete this docstring."""
    raise NotImplementedError("{MARK}: patch() of {new.id}")
'''


def test_stub(new: Draft) -> str:
    """The file of its test."""
    shows = _quoted(re.sub(r"([.\\[\](){}*+?|^$])", r"\\\1", new.symptom))
    raw = "r" if "\\" in shows else ""
    shows = shows.replace("\\\\", "\\")
    return f'''"""The defect of {new.id}."""

from __future__ import annotations

import pytest

FIX_ID = "{new.id}"
# What upstream says without the fix, as a regular expression.
SHOWS = {raw}{shows}


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_a_user_does():
    """{MARK}: do what a user does and assert what is right; it must fail with SHOWS on ``--side bare``."""
    pytest.fail("a stub; {MARK} {new.test}")
'''


def case_stub(new: Draft) -> str:
    """The file of its case."""
    return f'''"""{MARK}: the situation of a user in which {new.id} shows, in one line."""

from __future__ import annotations


def case(work: str) -> str | None:
    """{MARK}: reproduce it; raise CannotReproduce where this machine cannot, return what is right now; delete this."""
    raise NotImplementedError("a stub; {MARK} {new.case}")
'''


def with_index_line(new: Draft) -> str:
    """fixes/index.py with the line of the new fix in its place."""
    line = Target(new.id, new.target, new.claims, "", new.id, f"{new.library[0]}.{new.name}")
    return index.rendered(sorted([*TARGETS.values(), line], key=lambda target: target.name), OPTIONS, TESTED)


def with_changelog_line(text: str, new: Draft) -> str:
    """CHANGELOG.md with a line for the new fix, at the end of the section that has most of its neighbours."""
    links = ", ".join(f"[{_in_words(link)}]({link})" for link in new.upstream)
    end = f"\n  {links}" if links else " Not reported upstream."
    line = f"- `{new.id}`: {MARK}: what works now.{end}"
    lines = text.split("\n")
    heads = [number for number, one in enumerate(lines) if one.startswith(("## ", "### ", "# "))]
    near: Counter[int] = Counter()
    for number, (head, end) in enumerate(pairwise([*heads, len(lines) + 1])):
        for name in re.findall(r"(?m)^- (`.*?`):", "\n".join(lines[head:end])):
            for one in re.findall(r"`([a-z0-9-]+)`", name):
                near[number] += 100 * (one in TARGETS and TARGETS[one].module == new.target)
                near[number] += one.partition("-")[0] == new.id.partition("-")[0]
    at = [*heads[1:], len(lines)][near.most_common(1)[0][0]]
    while not lines[at - 1]:
        at -= 1
    return "\n".join([*lines[:at], line, *lines[at:]])


def start(new: Draft, root: Path = ROOT) -> list[str]:
    """Write everything; the names of the files, as they were written.

    Raises:
        ValueError: the id is taken, or does not fit its target; nothing is written then.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", new.id) or new.id.partition("-")[0] not in LIBRARIES:
        raise ValueError(f"{new.id!r} is no id: it is {', '.join(LIBRARIES)}, then words with - between them")
    if new.id in NAMES:
        raise ValueError(f"there is a fix {new.id}")
    if not f"{new.target}.".startswith(f"{new.library[1]}."):
        raise ValueError(f"{new.target} is no module of {new.library[1]}, which the id names")
    if not new.title or "\n" in new.title:
        raise ValueError("a title says the defect in one line")
    stubs = {new.test: test_stub(new), new.fix: fix_stub(new), new.case: case_stub(new)}
    taken = [name for name in stubs if (root / name).exists()]
    if taken:
        raise ValueError(f"there is a file {taken[0]}")
    for name, text in stubs.items():
        try:
            ast.parse(text)
        except SyntaxError:
            raise ValueError(
                f"{name} would be no Python: name the target as it is imported, and write title, symptom and links in "
                "one line each, without three quotation marks"
            ) from None
    stubs[CHANGELOG] = with_changelog_line((root / CHANGELOG).read_text("utf-8"), new)
    stubs[INDEX_FILE] = with_index_line(new)
    for name, text in stubs.items():
        (root / name).write_text(text, encoding="utf-8")
    return list(stubs)


def remove(fix_id: str, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Take a fix out.

    Returns:
        The files that were changed or deleted, and the places that still name the fix, as ``FILE:LINE: text``.

    Raises:
        ValueError: there is no such fix, or it is one target of a fix; nothing is changed then.
    """
    if fix_id not in FIXES:
        of = f"; it is a target of {TARGETS[fix_id].fix}: delete it in its file" if fix_id in TARGETS else ""
        raise ValueError(f"there is no fix {fix_id}{of}")
    names = FIXES[fix_id]
    changed = []
    for name in dict.fromkeys(file for one in names for file in files_of(one)):
        marks = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', _read(root / name))) & set(TARGETS)
        if (root / name).exists() and not (name.startswith("tests/") and marks - set(names)):
            (root / name).unlink()
            changed.append(name)
    for name, without in ((CHANGELOG, _without_lines), (ERRORS, _without_block), (RESULTS, _without_row)):
        text = before = _read(root / name)
        for one in dict.fromkeys((fix_id, *names)):
            text = without(text, one)
        if text != before:
            (root / name).write_text(text, encoding="utf-8")
            changed.append(name)
    for module in ("tests.index", "tests.upstream.tables"):
        subprocess.run([sys.executable, "-m", module, "--write"], cwd=root, check=True)
    return [*changed, INDEX_FILE, *PAGES], _named(names, root)


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def _without_lines(text: str, name: str) -> str:
    """The changelog without the entry that begins with this name."""
    return re.sub(rf"(?m)^- `{name}`:.*\n(?:  .*\n)*", "", text)


def _without_block(text: str, name: str) -> str:
    return re.sub(rf"(?ms)^=== {name} \(.*?(?=^=== |\Z)", "", text)


def _without_row(text: str, name: str) -> str:
    rows = json.loads(text)
    if name not in rows:
        return text
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(f'"{name}": ')]
    return re.sub(r",(\n\}\n)\Z", r"\1", "".join(lines))


def _named(names: Iterable[str], root: Path) -> list[str]:
    """The lines of the project that name one of these targets, or its files."""
    words = re.compile(
        "|".join(rf"(?<![\w-])({name}|test_{name.replace('-', '_')})(?![\w-])" for name in names)
    )
    places = []
    for part in ("diffusers_quantfix", "tests", "CHANGELOG.md", "README.md"):
        paths = sorted((root / part).rglob("*")) if (root / part).is_dir() else [root / part]
        for path in paths:
            if path.suffix in (".py", ".md", ".txt", ".json", ".toml") and path.is_file():
                for number, line in enumerate(_read(path).splitlines(), 1):
                    if words.search(line):
                        places.append(f"{path.relative_to(root).as_posix()}:{number}: {line.strip()[:100]}")
    return places


def _quoted(thing: object) -> str:
    """A literal in the quotes of this project."""
    if isinstance(thing, dict):
        return "{" + ", ".join(f"{_quoted(name)}: {_quoted(value)}" for name, value in thing.items()) + "}"
    text = str(thing).replace("\\", "\\\\")
    return f"'{text}'" if '"' in text and "'" not in text else '"' + text.replace('"', '\\"') + '"'


def _in_words(link: str) -> str:
    """``bitsandbytes issue 1527`` for a link."""
    found = re.search(r"([\w.-]+)/(issues|pull|discussions)/(\d+)", link)
    kinds = {"issues": "issue", "pull": "PR", "discussions": "discussion"}
    return f"{found[1]} {kinds[found[2]]} {found[3]}" if found else link


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
