"""A pytest plugin that runs the tests of another library and writes what became of each, one JSON object a line.

A process that dies leaves the line ``{"start": TEST}`` without its result.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 60  # of processor time, so that other work on the machine does not decide


class Limit(Exception):
    """A test took too long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peers-report", help="write a JSON line per test to this file")
    parser.addoption("--peers-select", default="{}", help="file -> pattern of its tests, in JSON")
    parser.addoption("--peers-never", default="", help="a pattern of tests that are left out")
    parser.addoption("--peers-leave", default="", help="a file of test ids, one a line, that are left out")
    parser.addoption(
        "--peers-only", default="", help="a file of test ids, one a line, the only ones that run"
    )
    parser.addoption("--peers-package", action="store_true", help="with the package")
    parser.addoption("--peers-rig", action="store_true", help="on the fake CUDA devices")


def pytest_configure(config: pytest.Config) -> None:
    """The package first, as in a user's program; the devices before a test file asks whether there are any."""
    if not config.getoption("--peers-report"):
        return
    if config.getoption("--peers-package"):
        import diffusers_quantfix  # noqa: F401
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    if config.getoption("--peers-rig"):
        import bitsandbytes  # noqa: F401  # both look for GPUs when they are imported
        import diffusers  # noqa: F401

        from tests import rig

        stack.enter_context(rig.devices())
    # Some of PEFT's test files say `from tests.testing_utils import ...`, and mean their own.
    import tests

    tests.__path__.append(config.args[0].split("::")[0].rpartition("/")[0])
    config.pluginmanager.register(Reporter(config), "peers-reporter")


class _AlwaysOnce(collections.defaultdict):
    def __contains__(self, key: object) -> bool:
        return True


class Reporter:
    """Selects the tests, and collects the phases of each into one line."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = Path(config.getoption("--peers-report"))
        self._select = json.loads(config.getoption("--peers-select"))
        self._open: dict[str, dict[str, Any]] = {}

    def _line(self, **what: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def _listed(self, option: str) -> set[str]:
        file = self._config.getoption(option)
        return set(Path(file).read_text(encoding="utf-8").splitlines()) if file else set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        only, leave = self._listed("--peers-only"), self._listed("--peers-leave")
        never = self._config.getoption("--peers-never") or "$^"
        chosen = []
        for item in items:
            file, _, test = name(item.nodeid).partition("::")
            wanted = name(item.nodeid) in only if only else re.search(self._select.get(file, ""), test)
            if wanted and name(item.nodeid) not in leave and not re.search(never, test):
                chosen.append(item)
        items[:] = chosen
        # PEFT's tests go to the Hub for the first use of a checkpoint, whatever HF_HUB_OFFLINE says.
        for module in list(sys.modules.values()):
            if "_HUB_MODEL_ACCESSES" in vars(module):
                module._HUB_MODEL_ACCESSES = _AlwaysOnce(int)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._line(
                test=name(report.nodeid), outcome=report.outcome, error=last_line(str(report.longrepr))
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._open[nodeid] = {"test": name(nodeid), "outcome": "passed", "error": "", "text": ""}
        self._line(start=name(nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        def stop(number: int, frame: object) -> None:
            raise Limit(f"more than {LIMIT_SECONDS} seconds of processor time")

        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        said = self._open[item.nodeid]
        if call.excinfo is not None and said["outcome"] == "passed":
            said["outcome"] = report.outcome
            said["error"] = call.excinfo.typename
            said["text"] = " ".join(str(call.excinfo.value).split())[:300]
        return report

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._line(**self._open.pop(nodeid))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        board = {}
        if self._config.getoption("--peers-package"):
            import diffusers_quantfix

            board = {said.id: said.state for said in diffusers_quantfix.status()}
        self._line(end=int(exitstatus), board=board)


def name(nodeid: str) -> str:
    """A test by its file and name, without the folder."""
    path, colons, test = nodeid.partition("::")
    return path.rpartition("/")[2] + colons + test


def last_line(text: str) -> str:
    """The line of a failed collection that says what was wrong."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.strip().splitlines() or [""])[-1][:300]
