"""Writes the stubs of a new fix, its line in the changelog and its line in the index."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from pathlib import Path

from diffusers_quantfix import __version__
from diffusers_quantfix.engine.fix import Fix, Target
from diffusers_quantfix.fixes import NAMES, OPTIONS, TESTED
from diffusers_quantfix.fixes.targets import TARGETS
from tests import index

from .files import CHANGELOG, INDEX_FILE, MARK, ROOT

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
