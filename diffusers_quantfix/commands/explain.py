"""``explain TEXT``: which bug an error belongs to, and what to do; ``explain ID``: all details of one fix.

``explain PIPELINE``: what has been proved about a pipeline.
"""

from __future__ import annotations

import os
import re
import sys

from ..fixes import NAMES
from ..fixes.targets import declaration, declarations
from ..text import wrapped
from .pages import head, page, page_data
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from typing import Any

    from ..advisories.symptoms import Match
    from ..engine.board import Answer

EXIT_CODES = (
    "0 the answer was printed; 1 no fix is known for this text, or the pipeline could not be tested; 2 the id names no "
    "fix, or the input cannot be read"
)
INPUT_LIMIT = 4_000_000  # bytes: a log; /dev/zero never ends
_COMMAND = "python -m diffusers_quantfix"
_AS_GOOD = 3.0  # a bug whose score is less by this much is not worth a line
# Just a file name: no error message looks like that.
_FILE = re.compile(r"\S*[^\s.:]\.(log|txt|out|err|md|json)|[.~]{0,2}/\S+|[A-Za-z]:\\\S+")


class Unreadable(Exception):
    """An input that cannot be read; the text is the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="ID | PIPELINE | TEXT | FILE | -",
        help="a fix, as `status` lists it; a pipeline such as FluxPipeline: what has been proved about it, quantized; "
        "or an error message in quotes, a file with a traceback, or - for one on standard input",
    )
    parser.add_argument(
        "--here", action="store_true", help="import the library and say whether the fix is applied here"
    )
    parser.add_argument(
        "--script",
        action="store_true",
        help="print a program that reproduces the bug, without this package",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print the text of an upstream issue, for a bug that has not been reported",
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="for a text: also print the page of the fix: cause, patch, links",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the page of one fix, or of the fix for a text."""
    words = options.what
    if not words:
        return _refuse("name a fix, an error message in quotes, a file, or - for standard input")
    if len(words) == 1 and words[0] in NAMES:
        return _explain_id(words[0], options)
    if (known := _pipeline(words, options)) is not None:
        return known
    if len(words) == 1 and _is_id(words[0]):
        return _explain_id(words[0], options)
    if options.script or options.report:
        return _refuse("--script and --report need the id of a fix")
    try:
        text = _text(words)
    except Unreadable as error:
        return _refuse(str(error))
    return _explain_text(text, options)


def _is_id(word: str) -> bool:
    return re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", word) is not None and not os.path.exists(word)


def _pipeline(words: list[str], options: argparse.Namespace) -> int | None:
    """The exit code after the answer about a pipeline; None where the words do not name one."""
    from . import pipeline

    name = " ".join(words)
    found = None if os.path.lexists(name[:255]) else pipeline.answer(name)
    if found is None:
        return None
    if options.script or options.report:
        return _refuse("--script and --report need the id of a fix")
    if options.json:
        import json

        print(json.dumps(found, indent=2))
    else:
        show("\n".join(pipeline.lines(found)))
    return 1 if found["not_built"] else 0


def _explain_id(fix_id: str, options: argparse.Namespace) -> int:
    from ..activation import target_names

    try:
        target_names((fix_id,))
    except ValueError as error:
        return _refuse(str(error))
    if options.script or options.report:
        return _reproduce(fix_id, options)
    answer = _answer(fix_id) if options.here else None
    if options.json:
        import json

        print(json.dumps(page_data(fix_id, answer), indent=2))
    else:
        show("\n".join(page(fix_id, answer)))
    return 0


def _reproduce(fix_id: str, options: argparse.Namespace) -> int:
    from .reproduction import NoScript, report, script

    links = declaration(fix_id).upstream
    if options.report and links:
        return _refuse(f"{fix_id} is already reported upstream: {', '.join(links)}")
    try:
        text = report(fix_id) if options.report else script(fix_id)
    except NoScript as reason:
        return _refuse(str(reason))
    print(text, end="")
    return 0


def _explain_text(text: str, options: argparse.Namespace) -> int:
    from ..advisories.symptoms import look_alike, search, stated_versions

    found = search(text, declarations())
    note = look_alike(text)
    answer = _answer(found[0].fix.id) if options.here and found else None
    best = page_data(found[0].fix.id, answer, stated_versions(text)) if found else None
    if options.json:
        import json

        data = {
            "found": best,
            "certain": bool(found) and found[0].by_message,
            "alternatives": [{"id": one.fix.id, "title": one.fix.title} for one in found[1:]],
            "look_alike": note,
        }
        print(json.dumps(data, indent=2))
        return 0 if found else 1
    if best is None:
        lines = _nothing(note)
    elif not found[0].by_message:
        lines = _perhaps(best, found)
    else:
        lines = _found(best, found, note)
    if found and options.details:
        lines += ["", *page(found[0].fix.id, answer)]
    show("\n".join(lines))
    return 0 if found else 1


def _found(best: Mapping[str, Any], found: list[Match], note: str) -> list[str]:
    lines = head(best)
    others = [one for one in found[1:] if one.by_message and one.score > found[0].score - _AS_GOOD]
    for number, one in enumerate(others[:2]):
        lines += wrapped(f"{one.fix.id}: {one.fix.title}", f"{'' if number else 'or':<7}", " " * 7)
    if others[2:]:
        rest = [one.fix.id for one in others[2:]]
        named = ", ".join(rest[:2]) + (f" and {len(rest) - 2} more" if rest[2:] else "")
        lines += wrapped(named, " " * 7)
    if others and found[0].frames <= others[0].frames:
        lines += wrapped(
            f"the message alone does not tell them apart: pass the whole traceback to `{_COMMAND} explain -`",
            " " * 7,
        )
    elif note and not others:
        lines += wrapped(f"if that is not it: {note}", f"{'or':<7}", " " * 7)
    return lines + _more(best)


def _perhaps(best: Mapping[str, Any], found: list[Match]) -> list[str]:
    if found[0].elsewhere:
        said = "its message is known, but the traceback does not go through the code that these fixes patch; perhaps"
    else:
        said = "no known error message; by the wording it may be"
    lines = [*wrapped(f"{said}:"), *head(best)]
    for number, one in enumerate(found[1:3]):
        lines += wrapped(f"{one.fix.id}: {one.fix.title}", f"{'' if number else 'or':<7}", " " * 7)
    lines += wrapped(f"to be more certain: pass the whole traceback to `{_COMMAND} explain -`", " " * 7)
    return lines + _more(best)


def _more(best: Mapping[str, Any]) -> list[str]:
    return wrapped(f"cause, patch and links: `{_COMMAND} explain {best['id']}`", f"{'more':<7}", " " * 7)


def _nothing(note: str) -> list[str]:
    if note:
        return wrapped(f"none of the known bugs: {note}")
    lines = ["no known bug matches this text; what to try:"]
    for hint in (
        f"the whole traceback instead of one line: `{_COMMAND} explain -`, then paste it and press Ctrl-D",
        f"`{_COMMAND} doctor`: releases that do not fit together, and what this machine cannot do",
        f"`{_COMMAND} verify`: which bugs this environment has, on tiny models",
        "`qf.audit(pipe)`: whether a tensor has a different device or dtype than its model",
    ):
        lines += wrapped(hint, "  ", "    ")
    return lines


def _answer(fix_id: str) -> Answer:
    from ..activation import status
    from .importing import importing

    with importing():
        return status()[fix_id]


def _text(words: list[str]) -> str:
    """The text to search for: the words themselves, or the content of the file or standard input that they name."""
    if len(words) > 1:
        return " ".join(words)
    (word,) = words
    try:
        if word == "-":
            if sys.stdin is None:
                raise Unreadable("standard input is closed; name a file, or pass the error message in quotes")
            return _decoded(sys.stdin.buffer.read(INPUT_LIMIT + 1))
        if "\n" not in word and os.path.isdir(word):
            raise Unreadable("that is a folder; name a file in it")
        if "\n" not in word and len(word) < 4096 and os.path.exists(word):
            with open(word, "rb") as file:
                return _decoded(file.read(INPUT_LIMIT + 1))
    except OSError as error:
        raise Unreadable(f"the input cannot be read: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL character in a name
        return word
    if _FILE.fullmatch(word):
        raise Unreadable("there is no such file; name another, or pass the error message in quotes")
    return word


def _decoded(data: bytes) -> str:
    if len(data) > INPUT_LIMIT:
        raise Unreadable(
            f"the input is longer than {INPUT_LIMIT // 1_000_000} MB; pass its end: `tail -c 100000 FILE | {_COMMAND} "
            "explain -`"
        )
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what PowerShell writes with >
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8", errors="replace")


def _refuse(sentence: str) -> int:
    print(f"diffusers-quantfix: {sentence}", file=sys.stderr)
    return 2
