"""What people paste, as the searches expect it."""

from __future__ import annotations

import re

# A deep pipeline's traceback has 30 kB.  A longer text is a log: only its end is searched, where the error is.
LIMIT = 200_000

EXCEPTION = re.compile(r"\b([A-Z]\w*(?:Error|Exception))\b")
FRAME = re.compile(r"File '[^']{1,500}', line \d+|\.py:\d+,? in |\.py', line \d+")
LINK = re.compile(r"(?<![\w.-])([\w.-]{1,40}/[\w.-]{1,100})(?:/(?:issues|pull)/|#)(\d{1,9})\b")

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Not a word of any message; patterns would take time quadratic in its length.
_LONG = re.compile(r"([!-~]{500})[!-~]+")
_ESCAPE = re.compile(r"\\([_*`\[\]()#-])")  # of Markdown
_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_CODE_LINE = re.compile(
    r"\s*(?:>>>|from \w|import \w|[\w.\[\]'\"]+ ?=[^=]|[\w.]+\($|[)\]}]+,?$|\w+=.*,$|\d+%\|)|.*\d+%\|"
)


def plain(text: str) -> str:
    """A text as `Fix.patterns` expects it: one line, ``'`` for every quotation mark, no backticks, ``/`` in paths."""
    text = _LONG.sub(r"\1", _ANSI.sub("", text[-LIMIT:]))
    if "&" in text:
        import html

        text = html.unescape(text)
    text = _ESCAPE.sub(r"\1", text).replace("\\", "/")
    for mark in '"“”‘’´':
        text = text.replace(mark, "'")
    for frame in "`│┃╭╮╰╯─❱^~":  # rich draws a box around a traceback
        text = text.replace(frame, " " if frame != "`" else "")
    return " ".join(text.split())


def joined(text: str) -> str:
    """A text without its line breaks."""
    return text.replace("\n", "")


def prose(text: str) -> str:
    """A description without its code, its traceback and its progress bars; at most 100 words."""
    text = _CODE.sub("\n", text[:20_000])
    lines = [line for line in text.splitlines() if line.strip() and not _CODE_LINE.match(line)]
    lines = [line for line in lines if not re.match(r"\s*File |\s{4,}", line)]
    words, kept = 0, []
    for line in lines:
        words += len(line.split())
        kept.append(line)
        if words > 100:
            break
    return "\n".join(kept)
