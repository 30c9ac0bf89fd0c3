"""A signal handler of the program that raises in the middle of our code: the error is the program's, not a fix's."""

from __future__ import annotations

import signal

import pytest

from .harness import PATCH, PROBE

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")

RAISES = """
    import signal, sys
    class Handler:
        def method(self, number, frame):
            raise {error}
        def __call__(self, number, frame):
            raise {error}
    def function(number, frame):
        raise {error}
    signal.signal(signal.SIGALRM, {handler})
"""
IMPORTED_TWICE = """
    import diffusers_quantfix
    try:
        import lib.core
    except BaseException as raised:
        said = str(raised)
    else:
        said = "nothing"
    import lib.core
    tell(said=said, f=lib.core.f(), state=states("fix-f"))
"""
LIBRARY_FIRST = """
    import lib.core
    try:
        import diffusers_quantfix
    except TimeoutError as raised:
        said = str(raised)
    else:
        said = "nothing"
    import diffusers_quantfix
    tell(said=said, f=lib.core.f(), state=states("fix-f"))
"""
TOLD = {"said": "mine", "f": "patched", "state": "applied"}
ONCE = """\
    if not hasattr(sys, {where!r}):
        sys.{where} = 1
        signal.raise_signal(signal.SIGALRM)
"""


def once(text: str, function: str) -> str:
    head, line, tail = text.partition(f"def {function}(")
    rest = tail.partition("\n")
    return f"import signal, sys\n{head}{line}{rest[0]}\n{ONCE.format(where=function)}{rest[2]}"


@pytest.mark.parametrize("handler", ["function", "Handler().method", "Handler()"])
@pytest.mark.parametrize("error", ["TimeoutError('mine')", "SystemExit('mine')"])
@pytest.mark.parametrize("where", ["broken", "patch"])
def test_it_comes_out_of_the_import(world, where, error, handler) -> None:
    """It became "its probe failed", and the program's time limit or exit was lost."""
    world.library()
    world.fix(body=once(PROBE + PATCH, where))
    script = RAISES.format(error=error, handler=handler) + IMPORTED_TWICE
    assert world.run(script).told == TOLD


def test_while_the_package_is_activated(world) -> None:
    """All fixes were off afterwards."""
    world.library()
    world.fix()
    script = (
        RAISES.format(error="TimeoutError('mine')", handler="function")
        + """
    import diffusers_quantfix
    def at(event, args):
        if event == "exec" and "activation" in args[0].co_filename and not hasattr(sys, "once"):
            sys.once = 1
            signal.raise_signal(signal.SIGALRM)
    sys.addaudithook(at)
"""
    )
    assert world.run(script + IMPORTED_TWICE).told == TOLD


LATER = """
    import functools, signal
    def ours(what, number, frame):
        raise TimeoutError(what)
    def restores(*given):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise TimeoutError("mine")
    signal.signal(signal.SIGALRM, {handler})
"""


@pytest.mark.parametrize("handler", ["functools.partial(ours, 'mine')", "restores"])
@pytest.mark.parametrize("where", ["broken", "patch"])
def test_a_handler_that_is_not_a_function_or_not_registered_any_more(world, where, handler) -> None:
    world.library()
    world.fix(body=once(PROBE + PATCH, where))
    assert world.run(LATER.format(handler=handler) + IMPORTED_TWICE).told == TOLD


def test_an_import_of_the_package_after_the_libraries(world) -> None:
    """It was swallowed by the package's own attempt to start once more."""
    world.library()
    world.fix(body=once(PROBE + PATCH, "broken"))
    assert (
        world.run(RAISES.format(error="TimeoutError('mine')", handler="function") + LIBRARY_FIRST).told
        == TOLD
    )


def test_an_error_of_a_function_that_gets_a_number_and_a_frame_is_no_signal() -> None:
    """Only the frame that called it, as Python calls a handler."""
    import sys

    from diffusers_quantfix.engine.signals import from_signal

    def raising(number, frame):
        raise ValueError(number)

    try:
        raising(14, sys._getframe().f_back)
    except ValueError as error:
        assert not from_signal(error)
