"""One test body, two sides: without the package and with it, in separate processes.

A test with ``@pytest.mark.defect(id, shows=...)`` asserts healthy behaviour.  With ``--side patched`` (the default)
it must pass.  With ``--side bare`` the package is off: where the fix's own gate (claim and probe) says broken, the
body must fail, with an error that matches ``shows``; where the gate says anything else, it must pass.  So one run
over many releases proves red, green, idle, and that the claimed range is exact in both directions.

Tests without the mark look deeper into a patch; they run on the patched side only.  Where a test with the mark fails
there, the report says what the board says of its fix.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import traceback
from collections.abc import Iterable, Iterator

import pytest

from tests.gate import gate, unmet

REFUSED = "Found an incompatible version of torchao"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--side",
        choices=("patched", "bare"),
        default="patched",
        help="with the package (patched) or without it (bare)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The order of things: settings of the process, the package, and only then a test imports a library."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--side") == "bare":
        os.environ["DIFFUSERS_QUANTFIX"] = "off"
    import diffusers_quantfix  # noqa: F401  # activates, as the first line of a user's program does


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session):
    """What is imported meanwhile stays: collecting garbage among it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_unknown_ids(items)
    if config.getoption("--side") == "patched":
        return
    kept = [item for item in items if item.get_closest_marker("defect")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def refuse_unknown_ids(items: list[pytest.Item]) -> None:
    """An error for a mark whose id is no target: such a test would prove nothing about any fix."""
    from diffusers_quantfix.fixes import NAMES
    from diffusers_quantfix.fixes.targets import TARGETS

    for item in items:
        for mark in item.iter_markers("defect"):
            if (name := mark.args[0]) not in TARGETS:
                several = f"; it has the targets {', '.join(NAMES[name])}" if name in NAMES else ""
                raise pytest.UsageError(f"{item.nodeid}: defect({name!r}) names no target of a fix{several}")


def on_the_board(names: Iterable[str]) -> str:
    """What the board says of these targets: why a patch that a test needs is not there."""
    import diffusers_quantfix

    board = diffusers_quantfix.status(load=False)
    return "\n".join(f"{name} is {board[name].state}: {board[name].reason}" for name in names)


@pytest.fixture
def side(request: pytest.FixtureRequest) -> str:
    """ "patched" or "bare"."""
    return str(request.config.getoption("--side"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    for mark in item.iter_markers("defect"):
        needs = mark.kwargs.get("needs", ())
        for requirement in (needs,) if isinstance(needs, str) else needs:
            sentence = unmet(requirement)
            if sentence:
                pytest.skip(sentence)
    with skipped_where_peft_refuses():
        return (yield)


@contextlib.contextmanager
def skipped_where_peft_refuses() -> Iterator[None]:
    """Skip what ends because PEFT takes no LoRA at all beside the installed torchao."""
    try:
        yield
        return
    except (Exception, pytest.fail.Exception) as error:
        if REFUSED not in _everything(error):
            raise
        # pytest keeps the error, and so what the test had on a device.
        one: BaseException | None = error
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
    pytest.skip("peft refuses this torchao")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    with skipped_where_peft_refuses():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    marks = list(pyfuncitem.iter_markers("defect"))
    if not marks:
        return (yield)
    if pyfuncitem.config.getoption("--side") == "patched":
        try:
            return (yield)
        except (Exception, pytest.fail.Exception):
            pyfuncitem.add_report_section(
                "call", "with the package", on_the_board(mark.args[0] for mark in marks)
            )
            raise
    said = {mark.args[0]: gate(mark.args[0]) for mark in marks}
    broken = [mark for mark in marks if said[mark.args[0]][0]]
    pyfuncitem.user_properties += [(f"gate:{fix_id}", why) for fix_id, (_, why) in said.items()]
    try:
        result = yield
    except (Exception, pytest.fail.Exception) as error:
        if not broken:
            raise
        text = _everything(error)
        if not any(re.search(mark.kwargs["shows"], text) for mark in broken):
            raise AssertionError(
                f"the defect of {broken[0].args[0]} should show as {broken[0].kwargs['shows']!r}, it was: {text}"
            ) from error
        return True
    if broken:
        pytest.fail(f"the gate says {said[broken[0].args[0]][1]}, but no defect showed", pytrace=False)
    return result


def _everything(error: BaseException | None) -> str:
    """Type and text of an error and of all that led to it."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)
