"""Reading untrusted files: where a file may be, what kind it may be, how much is read in total."""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 16_000_000
MAX_FILES = 500
MAX_DEPTH = 30
MAX_LINES = 500_000
MAX_LINE = 100_000
MAX_SECONDS = 60

FOLLOW = "--follow-outside"
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


class UnreadableInput(ValueError):
    """An input that cannot be read; the text names the file, the line and the next step, and quotes nothing."""


class NoFile(UnreadableInput):
    """There is no regular file of that name."""


class OutsideProject(UnreadableInput):
    """A file outside the project of the given file."""


class Files:
    """The files of one check.

    Args:
        outside: whether files outside the project of the given file may be read.
    """

    def __init__(self, outside: bool = False) -> None:
        self._outside = outside
        self._project = ""
        self._bytes_left = MAX_BYTES
        self._lines_left = MAX_LINES
        self._files_left = MAX_FILES
        self._depth = 0
        self._steps = 0
        self._until = time.monotonic() + MAX_SECONDS
        self._seen: set[tuple[str, str]] = set()

    def given(self, file: str) -> str:
        """The text of a file that was named on the command line; files that it includes must be in its project."""
        self._enter(os.path.dirname(file))
        text = self._text(file, shown(file))
        self._seen |= {(os.path.realpath(file), how) for how in ("-r", "-e")}
        return text

    def standard_input(self) -> str:
        """The text on standard input; files that it includes must be in the project of the working folder."""
        called = "standard input"
        if sys.stdin is None:
            raise UnreadableInput("standard input is closed; pipe the output of `pip freeze` into it")
        self._enter("")
        try:
            data = sys.stdin.buffer.read(self._bytes_left + 1)
        except (OSError, ValueError):
            raise UnreadableInput("standard input cannot be read") from None
        return self._decoded(called, data)

    def included(self, where: object, path: str, called: str, how: str) -> str | None:
        """The text of a file that another includes; None if it was already read in this way.

        Args:
            where: the file and the line that include it.
            path: the file.
            called: its name in sentences.
            how: "-r", "-c" or the like: a file may be a constraint and a requirement.

        Raises:
            OutsideProject: it is outside the project of the given file.
            UnreadableInput: it cannot be read, or is one too many.
        """
        try:
            key = (os.path.realpath(path), how)
        except (OSError, ValueError):
            raise NoFile(f"{where}: this is not a file name") from None
        self._check_project(where, key[0])
        if key in self._seen:
            return None
        if self._files_left == 0:
            raise UnreadableInput(f"{where}: more than {MAX_FILES} files are included")
        text = self._text(path, called, f"{where}: the file that it includes")
        self._files_left -= 1
        self._seen.add(key)
        return text

    @contextlib.contextmanager
    def deeper(self, where: object) -> Iterator[None]:
        """While an included file is read."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableInput(f"{where}: files include each other more than {MAX_DEPTH} deep")
        try:
            yield
        finally:
            self._depth -= 1

    def step(self, file: str) -> None:
        """One more line or package; called often."""
        self._steps += 1
        if not self._steps % 256 and time.monotonic() > self._until:
            raise UnreadableInput(f"{file}: reading took more than {MAX_SECONDS} seconds, and was stopped")

    def _enter(self, folder: str) -> None:
        try:
            self._project = _project_of(os.path.realpath(folder or "."))
        except (OSError, ValueError):
            raise UnreadableInput("this is not a file name") from None

    def _check_project(self, where: object, real: str) -> None:
        if not self._outside and not _is_within(real, self._project):
            raise OutsideProject(f"{where} points outside the project; {FOLLOW} reads it")

    def _text(self, path: str, called: str, subject: str = "") -> str:
        subject = subject or called
        try:
            real = os.path.realpath(path)
            self._check_project(subject, real)
            if not stat.S_ISREG(os.stat(real).st_mode):
                raise NoFile(f"{subject} is not a regular file; pipe what a command prints into `check -`")
            with open(real, "rb", opener=_open_without_waiting) as opened:
                data = opened.read(self._bytes_left + 1)
        except UnreadableInput:
            raise
        except OSError as error:
            raise NoFile(f"{subject}: {error.strerror or 'cannot be read'}") from None
        except ValueError:  # a NUL in the name
            raise NoFile(f"{subject}: this is not a file name") from None
        return self._decoded(called, data)

    def _decoded(self, called: str, data: bytes) -> str:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise UnreadableInput(f"{called}: more than {MAX_BYTES // 1_000_000} MB to read in all")
        text = _decoded(called, data)
        lines = text.splitlines()
        self._lines_left -= len(lines)
        if self._lines_left < 0:
            raise UnreadableInput(f"{called}: more than {MAX_LINES} lines to read in all")
        if len(text) > MAX_LINE:
            for number, line in enumerate(lines, 1):
                if len(line) > MAX_LINE:
                    raise UnreadableInput(f"{called}, line {number} has more than {MAX_LINE} characters")
        return text


def shown(name: str) -> str:
    """A file name that is safe to print: no control characters, broken Unicode, or GitHub Actions log commands."""
    printable = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in name
    )
    return printable.replace("::", r":\x3a").replace("##[", r"#\x23[")


def _decoded(called: str, data: bytes) -> str:
    """The text of a file; PowerShell's ``pip freeze > requirements.txt`` writes UTF-16."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableInput(f"{called} is not UTF-8 text; save it as UTF-8") from None
    if "\0" in text:
        raise UnreadableInput(f"{called} is not text: it has NUL characters")
    return text


def _project_of(folder: str) -> str:
    """The repository that a folder is in, else the nearest project, else the folder itself."""
    nearest = ""
    current = folder
    while True:
        if os.path.exists(os.path.join(current, ".git")):
            return current
        if not nearest and any(os.path.exists(os.path.join(current, name)) for name in _PROJECT_FILES):
            nearest = current
        parent = os.path.dirname(current)
        if parent == current:
            return nearest or folder
        current = parent


def _is_within(path: str, folder: str) -> bool:
    try:
        return os.path.commonpath([path, folder]) == folder
    except ValueError:  # two drives of Windows
        return False


def _open_without_waiting(path: str, flags: int) -> int:
    # if it has been replaced by a pipe, opening it would wait for a writer
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
