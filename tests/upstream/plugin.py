"""A pytest plugin that writes what became of every test, one JSON object per line, as it happens.

Loaded by the driver with ``-p tests.upstream.plugin --cell-report FILE``.  A process that dies leaves the line
``{"start": TEST}`` without its result, so the driver can name the test that killed it.

With ``--cell-alone NAME`` (a range: one distribution without the rest of the stack) a test that asks for another
library of the stack is skipped with that reason.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

STACK = ("diffusers", "transformers", "accelerate", "peft", "optimum", "sentencepiece", "google", "PIL")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cell-report", help="write a JSON line per test to this file")
    parser.addoption("--cell-inspect", default="", help="inspect the fixes at the end, into this file")
    parser.addoption("--try-candidates", action="store_true", help="inspect: patch also outside of a claim")
    parser.addoption("--cell-alone", default="", help="the one distribution that this environment has")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cell-report"):
        config.pluginmanager.register(Reporter(config), "cell-reporter")


class Reporter:
    """Collects the phases of each test into one line."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = Path(config.getoption("--cell-report"))
        self._path.write_text("")
        self._alone = config.getoption("--cell-alone")
        flags = ["--try-candidates"] if config.getoption("--try-candidates") else []
        self._inspect = [config.getoption("--cell-inspect"), *flags]
        self._side = config.getoption("--side")
        self._fixes: dict[str, list[str]] = {}
        self._open: dict[str, dict[str, Any]] = {}

    def _line(self, **what: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._fixes[item.nodeid] = [mark.args[0] for mark in item.iter_markers("defect")]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "passed":
            return
        text = str(report.longrepr)
        missing = _missing_module(text) if self._alone else ""
        if missing:
            self._line(test=report.nodeid, outcome="skipped", reason=self._left_out(missing))
        elif report.outcome == "skipped":
            self._line(test=report.nodeid, outcome="skipped", reason=_skip_reason(report.longrepr))
        else:
            self._line(test=report.nodeid, outcome="failed", reason=f"cannot be collected: {_tail(text)}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._open[nodeid] = {"test": nodeid, "outcome": "passed", "seconds": 0.0}
        self._line(start=nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function):
        try:
            return (yield)
        except Exception as error:
            missing = self._alone and _missing_in_chain(error)
            if missing:
                pytest.skip(self._left_out(missing))
            raise

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = self._open[report.nodeid]
        said["seconds"] = round(said["seconds"] + report.duration, 3)
        said["gates"] = {name[5:]: why for name, why in report.user_properties if name.startswith("gate:")}
        if hasattr(report, "wasxfail"):
            said.update(outcome="failed", reason="marked xfail: a test of a fix passes, fails or is skipped")
        elif report.failed:
            said.update(outcome="failed", reason=_tail(str(report.longrepr)))
        elif report.skipped and said["outcome"] == "passed":
            said.update(outcome="skipped", reason=_skip_reason(report.longrepr))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._line(**self._open.pop(nodeid), fixes=self._fixes.get(nodeid, []))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        board = {}
        if self._side == "patched":
            import diffusers_quantfix

            board = diffusers_quantfix.status().to_dict()
        self._line(end=int(exitstatus), board=board, processor_seconds=round(time.process_time(), 1))
        if self._inspect[0]:
            _inspect_in_a_child(self._inspect)

    def _left_out(self, missing: str) -> str:
        return f"needs {missing}, which is left out beside {self._alone} alone"


def _inspect_in_a_child(arguments: list[str]) -> None:
    """Inspect in a fork: it patches for a try, and has all libraries imported, which costs most of the time.

    Without its report the driver inspects in a process of its own, so nothing that goes wrong here is lost.
    """
    from tests.upstream import inspect_fixes  # it imports the package, which this plugin must not do earlier

    child = os.fork()
    if child == 0:
        try:
            inspect_fixes.main(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.waitpid(child, 0)


def _missing_in_chain(error: BaseException | None) -> str:
    """The library of the stack whose absence led to this error."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in STACK:
            return (error.name or "").partition(".")[0]
        error = error.__cause__ or error.__context__
    return ""


def _missing_module(text: str) -> str:
    return next((name for name in STACK if f"No module named '{name}" in text), "")


def _skip_reason(longrepr: Any) -> str:
    """The sentence of a skip; pytest gives (file, line, "Skipped: sentence")."""
    text = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
    return text.removeprefix("Skipped: ").strip()


def _tail(text: str) -> str:
    """The lines of a failure that say what was wrong."""
    lines = text.strip().splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return " ".join(" ".join(errors or lines[-3:]).split())[:600]
