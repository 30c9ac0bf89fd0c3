"""Platforms that are not here, emulated: what Windows and macOS lack, their paths and consoles, and a later Python.

Nothing of this ran on Windows or macOS. The package's own code runs, with the parts of the standard library taken away
that are not there.
"""

from __future__ import annotations

import ntpath

import pytest

from tests.startup.conftest import ACTIVE, ROOT, Environment, checked

PACKAGE = ROOT / "diffusers_quantfix"

# Of another platform: what its Python does not have, and how it says what it is. Applied before our first import.
LACKS = """
import multiprocessing, os, signal, subprocess, sys, importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for name in ABSENT: sys.modules.pop(name, None)
for owner, names in ((os, NO_OS), (signal, NO_SIGNALS)):
    for name in names:
        if hasattr(owner, name): delattr(owner, name)
sys.platform = PLATFORM
multiprocessing.set_start_method("spawn")
"""
WINDOWS = (
    "PLATFORM = 'win32'; ABSENT = {'fcntl', 'resource', 'pwd', 'grp', 'termios', 'posix_ipc', 'readline'}\n"
    "NO_OS = ('fork', 'forkpty', 'getuid', 'geteuid', 'getpgid', 'killpg', 'setsid',\n"
    "         'O_NONBLOCK', 'sched_getaffinity', 'mkfifo')\n"
    "NO_SIGNALS = ('SIGKILL', 'SIGHUP', 'SIGALRM', 'SIGCHLD', 'SIGUSR1', 'setitimer', 'alarm')\n"
)
MACOS = "PLATFORM = 'darwin'; ABSENT = set(); NO_OS = ('sched_getaffinity',); NO_SIGNALS = ()\n"
# A container or sandbox that allows no further process, and has no semaphores for multiprocessing.
SANDBOX = (
    "import os, sys\n"
    "def refuse(*args): raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
    "os.fork = refuse\n"
    "PLATFORM = sys.platform; ABSENT = {'_multiprocessing', '_posixshmem'}; NO_OS = NO_SIGNALS = ()\n"
)
ELSEWHERE = pytest.mark.parametrize("lacks", [WINDOWS, MACOS, SANDBOX], ids=["windows", "macos", "sandbox"])


# The libraries, which look for the real platform when they are imported, are not in this environment.
def command(environment: Environment, lacks: str, *words: str, given: str = "", **variables: str):
    """A command of the package on another platform."""
    program = f"{lacks}{LACKS}\nfrom diffusers_quantfix.__main__ import main\nsys.exit(main({list(words)!r}))"
    return environment.run("-c", program, given=given, **variables)


@ELSEWHERE
def test_every_module_of_ours_is_imported(environment: Environment, lacks: str):
    names = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if not {"cases", "startup"} & set(path.parts) and path.name != "__main__.py"
    )
    assert len(names) > 100
    program = f"""{lacks}{LACKS}
import importlib
imported = 0
for name in {names!r}:
    try:
        importlib.import_module(name)
        imported += 1
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "diffusers", "transformers", "accelerate"): raise
print(imported)
"""
    assert int(checked(environment.run("-c", program)).stdout) > 100


@ELSEWHERE
@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("check", "-"), "bitsandbytes==0.45.2\n"),
        (("explain", "bnb-quant-state-code"), ""),
        (("explain", "-"), "NotImplementedError: Cannot copy out of meta tensor; no data!\n"),
        (("status",), ""),
        (("doctor",), ""),
        (("enable",), ""),
        (("disable",), ""),
        (("verify",), ""),
        (("run", "-m", "this"), ""),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_command_answers(environment: Environment, lacks: str, words: tuple[str, ...], given: str):
    here = environment.run("-m", "diffusers_quantfix", *words, given=given)
    done = command(environment, lacks, *words, given=given)
    assert done.returncode == here.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines() == here.stdout.splitlines() != []


# Of Western and American Windows, of a POSIX machine without a locale; each refuses what it cannot say.
@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii"])
def test_a_console_that_is_not_utf8(environment: Environment, encoding: str):
    pins = "torch==2.5.1\ndiffusers==0.35.2\nbitsandbytes\n"
    for words in (("explain", "bnb-quant-state-code"), ("check", "-"), ("doctor",)):
        done = command(environment, WINDOWS, *words, given=pins, PYTHONIOENCODING=f"{encoding}:strict")
        assert "Traceback" not in done.stderr and done.stdout, done.stderr


def test_whatever_a_fix_says_fits_every_console():
    """Declarations, docstrings and sentences: plain ASCII, so that no console refuses them."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    # They only read: the frames that some terminals draw around an error, and Chinese and Japanese reports.
    assert {name for name, text in sources.items() if not text.isascii()} == {"texts.py", "vocabulary.py"}


def test_no_file_is_read_in_the_encoding_of_the_machine(environment: Environment):
    pins = ROOT / "tests" / "tools" / "pin_files" / "requirements.txt"
    done = environment.run(
        *("-X", "warn_default_encoding", "-W", "error::EncodingWarning"),
        *("-m", "diffusers_quantfix", "check", pins),
    )
    assert "EncodingWarning" not in done.stderr and done.returncode in (0, 1), done.stderr


def test_the_choice_lies_beside_the_start_up_file_on_windows():
    source = (PACKAGE / "startup" / "enabled.py").read_text(encoding="utf-8")
    folder = r"C:\Users\me\env\Lib\site-packages\diffusers_quantfix_startup"
    names = {"__file__": ntpath.join(folder, "enabled.py"), "__name__": "diffusers_quantfix_startup.enabled"}
    source = source.replace("from . import NAMES", "#")
    exec(compile(source, names["__file__"], "exec"), names)
    assert names["CHOICE"] == ntpath.join(folder, "choice")
    line = (PACKAGE / "startup" / "diffusers_quantfix_startup.pth").read_text(encoding="utf-8")
    tail = line.partition('"/')[2].partition('"')[0]
    assert ntpath.normpath(f"{ntpath.dirname(folder)}/{tail}") == folder


# What `site` of a Python with PEP 829 does with a folder: for each .start file, sorted by name, every line that is not
# blank or a comment is an entry point; errors are reported and stop nothing. Lines of code in a .pth file of the same
# name are then passed over.
READS_START_FILES = """
import os, pkgutil, sys, traceback
sitedir = SITEDIR
sys.path.append(sitedir)
for name in sorted(name for name in os.listdir(sitedir) if name.endswith(".start")):
    with open(os.path.join(sitedir, name), encoding="utf-8-sig") as file:
        for line in file.read().splitlines():
            line = line.strip()
            if line and not line.startswith("#"):
                module, colon, callable_ = line.partition(":")
                assert module and colon and callable_, "the strict form is wanted"
                try:
                    pkgutil.resolve_name(line)()
                except Exception:
                    traceback.print_exc()
"""


def starts(environment: Environment, times: int = 1, **variables: str) -> tuple[bool, str]:
    """Whether the package is active in a Python that reads start files, and what was said."""
    ask = f"print({ACTIVE}, sum('diffusers_quantfix' in type(f).__module__ for f in sys.meta_path))"
    program = (
        READS_START_FILES.replace("SITEDIR", repr(str(environment.site))) * times + f"\nimport sys\n{ask}"
    )
    done = checked(environment.run("-S", "-c", program, **variables))
    return done.stdout.startswith("True"), done.stderr


def test_a_python_that_reads_start_files(environment: Environment):
    """Emulated: no Python here reads them."""
    assert starts(environment) == (False, "")
    assert starts(environment, DIFFUSERS_QUANTFIX_AUTO="1") == (True, "")
    assert starts(environment, DIFFUSERS_QUANTFIX_AUTO="0") == (False, "")
    assert starts(environment, times=2, DIFFUSERS_QUANTFIX_AUTO="1") == (True, "")
    checked(environment.run("-m", "diffusers_quantfix", "enable"))
    assert starts(environment) == (True, "")
    assert starts(environment, DIFFUSERS_QUANTFIX_AUTO="0") == (False, "")


def test_both_start_up_files_say_the_same():
    start = (PACKAGE / "startup" / "diffusers_quantfix_startup.start").read_text(encoding="utf-8")
    module, _, function = start.strip().partition(":")
    code = (PACKAGE / "startup" / "diffusers_quantfix_startup.pth").read_text(encoding="utf-8")
    assert f'__import__("{module}")' in code and code.count("\n") == 1
    source = (PACKAGE / "startup" / "run.py").read_text(encoding="utf-8")
    assert f"\ndef {function}():" in source and source.endswith(f"\n\n\n{function}()\n")
