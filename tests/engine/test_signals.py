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
