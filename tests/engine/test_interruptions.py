"""The program interrupts our code with an error, from a signal handler or another thread: it is not a fix's."""

from __future__ import annotations

import signal
import sys
import types

import pytest

from diffusers_quantfix.engine import interruptions

from .harness import PATCH, PROBE

alarm = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")

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
ORDER = """
    import {first}
    try:
        import {second}
    except BaseException as raised:
        said = str(raised)
    else:
        said = "nothing"
    import {second}
    tell(said=said, f=lib.core.f(), state=states("fix-f"))
"""
IMPORTED_TWICE = ORDER.format(first="diffusers_quantfix", second="lib.core")
LIBRARY_FIRST = ORDER.format(first="lib.core", second="diffusers_quantfix")
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


@alarm
@pytest.mark.parametrize("handler", ["function", "Handler().method", "Handler()"])
@pytest.mark.parametrize("error", ["TimeoutError('mine')", "SystemExit('mine')"])
@pytest.mark.parametrize("where", ["broken", "patch"])
def test_it_comes_out_of_the_import(world, where, error, handler) -> None:
    """It became "its probe failed", and the program's time limit or exit was lost."""
    world.library()
    world.fix(body=once(PROBE + PATCH, where))
    script = RAISES.format(error=error, handler=handler) + IMPORTED_TWICE
    assert world.run(script).told == TOLD


@alarm
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
    def deletes(number, frame):
        del number, frame
        raise TimeoutError("mine")
    @functools.wraps(deletes)
    def decorated(number, frame):
        number = signal.Signals(number).name
        while frame:
            frame = frame.f_back
        deletes(number, frame)
    class Deletes:
        def __call__(self, number, frame):
            deletes(number, frame)
    signal.signal(signal.SIGALRM, {handler})
"""


@alarm
@pytest.mark.parametrize(
    "handler", ["functools.partial(ours, 'mine')", "restores", "deletes", "decorated", "Deletes()"]
)
@pytest.mark.parametrize("where", ["broken", "patch"])
def test_a_handler_that_is_not_a_function_or_not_registered_any_more(world, where, handler) -> None:
    world.library()
    world.fix(body=once(PROBE + PATCH, where))
    assert world.run(LATER.format(handler=handler) + IMPORTED_TWICE).told == TOLD


HEALTHY_PROBE = """
def broken(module):
    return False
"""
READING_PROBE = """
import functools, lib.core
from diffusers_quantfix.engine.probe import unimported_code
{seam}

def broken(module):
    unimported_code("lib.core", "f")
    return module.f() == "broken"
"""
SEAM = """
import importlib.util
find_spec = importlib.util.find_spec

def once(*arguments):
    importlib.util.find_spec = find_spec
    signal.raise_signal(signal.SIGALRM)
    return find_spec(*arguments)
import signal
importlib.util.find_spec = once
"""


@alarm
def test_while_a_healthy_release_is_looked_at(world) -> None:
    """Whose code is in the slots is asked of the patch, by a report."""
    world.library()
    world.fix(body=once(HEALTHY_PROBE + PATCH, "patch"))
    report = """
    import diffusers_quantfix, lib.core
    try:
        diffusers_quantfix.status(load=False)
    except SystemExit as raised:
        said = str(raised)
    else:
        said = "nothing"
    tell(said=said, f=lib.core.f(), state=states("fix-f"))
    """
    script = RAISES.format(error="SystemExit('mine')", handler="function") + report
    assert world.run(script).told == {"said": "mine", "f": "broken", "state": "healthy"}


@alarm
def test_a_timeout_while_code_is_read(world) -> None:
    """TimeoutError is an OSError, as of a file that cannot be read."""
    world.library()
    world.fix(body=READING_PROBE.format(seam=SEAM) + PATCH)
    assert (
        world.run(RAISES.format(error="TimeoutError('mine')", handler="function") + IMPORTED_TWICE).told
        == TOLD
    )


@alarm
def test_while_the_other_finders_are_asked(world) -> None:
    world.library()
    world.fix()
    finder = """
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "lib.core" and not hasattr(sys, "once"):
                sys.once = 1
                signal.raise_signal(signal.SIGALRM)
    sys.meta_path.insert(0, Finder())
    """
    script = RAISES.format(error="TimeoutError('mine')", handler="function") + finder + IMPORTED_TWICE
    assert world.run(script).told == TOLD


@alarm
def test_an_import_of_the_package_after_the_libraries(world) -> None:
    """It was swallowed by the package's own attempt to start once more."""
    world.library()
    world.fix(body=once(PROBE + PATCH, "broken"))
    assert (
        world.run(RAISES.format(error="TimeoutError('mine')", handler="function") + LIBRARY_FIRST).told
        == TOLD
    )


def test_while_another_thread_imports_signal(monkeypatch) -> None:
    """Whether an error is an interruption is asked at every error that we expect, in any thread."""
    monkeypatch.setitem(sys.modules, "signal", types.ModuleType("signal"))
    try:
        raise ValueError
    except ValueError as error:
        assert not interruptions.is_interruption(error)


def test_where_the_file_that_tells_them_is_damaged(world) -> None:
    """A finder that fails costs the fix then, never the import."""
    world.library()
    world.fix()
    outcome = world.run("""
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "lib.core" and not hasattr(sys, "once"):
                    sys.once = 1
                    raise ValueError
        import diffusers_quantfix as qf
        sys.meta_path.insert(1, Finder())
        qf.status(load=False)
        sys.modules["diffusers_quantfix.engine.interruptions"] = None
        import lib.core
        tell(f=lib.core.f())
    """)
    assert outcome["f"] == "broken"


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="sys.monitoring came with Python 3.12")
@pytest.mark.parametrize("raises", ["raise Ended('mine')", "sys.exit('mine')", "frame.f_locals['none']"])
def test_a_function_that_monitors_the_program_ends_it(raises) -> None:
    """As pdb does from Python 3.14 on. What it fails at is no interruption."""
    from diffusers_quantfix.engine.interruptions import is_interruption

    Ended = type("Ended", (Exception,), {})
    body = f"def monitors(code, line):\n    if code.co_name == 'probe':\n        {raises}\n"
    held = {"Ended": Ended, "sys": sys, "frame": sys._getframe(), "__name__": "a_tool"}
    exec(body, held)

    def probe():
        return 1

    sys.monitoring.use_tool_id(4, "a tool")
    try:
        sys.monitoring.register_callback(4, sys.monitoring.events.LINE, held["monitors"])
        sys.monitoring.set_events(4, sys.monitoring.events.LINE)
        try:
            probe()
        except BaseException as error:
            found = error
    finally:
        sys.monitoring.set_events(4, 0)
        sys.monitoring.free_tool_id(4)
    assert is_interruption(found) == (not isinstance(found, KeyError))


ERRORS = ("RAISE", "RERAISE", "PY_UNWIND", "EXCEPTION_HANDLED", "PY_START", "PY_RETURN", "CALL", "C_RAISE")


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="sys.monitoring came with Python 3.12")
@pytest.mark.parametrize("event", ERRORS)
@pytest.mark.parametrize("kind", ["Ended", "SystemExit", "KeyError"])
def test_a_function_that_monitors_errors_ends_the_program(event, kind) -> None:
    """Its frame has none before it in the traceback, where the error was raised or handled in that frame."""
    Ended = type("Ended", (Exception,), {})
    statement = "{}['none']" if kind == "KeyError" else f"raise {kind}('mine')"
    body = f"def monitors(code, offset, *more):\n    if code.co_name == 'monitored': {statement}\n"
    held = {"Ended": Ended, "__name__": "a_tool"}
    exec(body, held)

    def monitored():
        try:
            try:
                int("x")
            finally:
                number.bit_count()
        except ValueError:
            return 1
        return 2

    def unwound():
        def monitored():
            int("x")

        monitored()

    sys.monitoring.use_tool_id(4, "a tool")
    number = getattr(sys.monitoring.events, event)
    found = None
    try:
        sys.monitoring.register_callback(4, number, held["monitors"])
        sys.monitoring.set_events(4, sys.monitoring.events.CALL if event == "C_RAISE" else number)
        try:
            (unwound if event == "PY_UNWIND" else monitored)()
        except BaseException as error:
            found = error
    finally:
        sys.monitoring.set_events(4, 0)
        sys.monitoring.free_tool_id(4)
    assert type(found).__name__ == kind
    assert interruptions.is_interruption(found) == (kind != "KeyError")


def test_an_error_in_place_of_an_interruption() -> None:
    """A context manager of torch fails to restore its state when the interruption comes in the middle of that."""
    Ended = type("Ended", (Exception,), {})
    tool = types.ModuleType("a_tool")
    tool.Ended = Ended
    exec("def trace(frame, event, argument):\n    raise Ended('mine')", vars(tool))

    def probe(raises):
        try:
            raises()
        finally:
            [].pop()

    def ended():
        tool.trace(sys._getframe(), "line", None)

    def fails():
        raise ValueError

    for raises, kind in ((ended, Ended), (fails, IndexError)):
        with pytest.raises(kind):
            try:
                probe(raises)
            except IndexError as error:
                interruptions.heed_interruption(error)
                raise


def test_an_interruption_that_the_program_has_handled() -> None:
    Ended = type("Ended", (Exception,), {})
    tool = types.ModuleType("a_tool")
    tool.Ended = Ended
    exec("def trace(frame, event, argument):\n    raise Ended('mine')", vars(tool))

    def probe():
        [].pop()

    try:
        tool.trace(sys._getframe(), "line", None)
    except Ended:
        with pytest.raises(IndexError):
            try:
                probe()
            except IndexError as error:
                assert isinstance(error.__context__, Ended)
                interruptions.heed_interruption(error)
                raise


@pytest.mark.parametrize("event", ["call", "line", "return", "c_call"])
@pytest.mark.parametrize("where", ["broken", "patch"])
@pytest.mark.parametrize("raises", ["raise Ended('mine')", "sys.exit('mine')", "other.raises()"])
def test_a_trace_function_that_ends_the_program(world, where, event, raises) -> None:
    """``q`` in pdb, and a thread that can be ended: Python takes the function away, and it never raised again."""
    world.library()
    world.fix(body=once(PROBE + PATCH, where).replace("signal.raise_signal(signal.SIGALRM)", "ended(sys)"))
    asked = world.run(f"""
        import sys, builtins, types
        import diffusers_quantfix as qf
        class Ended(Exception):
            pass
        other = types.ModuleType("other")
        other.Ended = Ended
        exec("def raises():\\n    raise Ended('mine')", vars(other))
        kind = "profile" if {event!r}.startswith("c_") else "trace"
        def trace(frame, event, argument):
            if event == {event!r} and frame.f_code.co_name == "traced":
                {raises}
            return trace
        library = types.ModuleType("library")
        exec("def traced():\\n    return len([])", vars(library))
        exec("def ended(sys):\\n    begin(trace)\\n    traced()", vars(library))
        library.begin, library.trace = getattr(sys, "set" + kind), trace
        builtins.ended = library.ended
        try:
            import lib.core
        except (Ended, SystemExit) as raised:
            said = str(raised)
        else:
            said = "nothing"
        getattr(sys, "set" + kind)(None)
        import lib.core
        tell(said=said, f=lib.core.f(), state=states("fix-f"))
    """)
    assert asked.told == TOLD


@pytest.mark.parametrize(
    "mistake", ["{}[frame]", "frame.f_locals['none']", "argparse.Namespace().none", "other.raises()"]
)
def test_a_mistake_of_a_trace_function_is_none(world, mistake) -> None:
    """It met an object of a probe that it would not have met in the program."""
    world.library()
    world.fix(
        body=once(PROBE + PATCH, "broken").replace("signal.raise_signal(signal.SIGALRM)", "looked_at(sys)")
    )
    asked = world.run(f"""
        import argparse, sys, builtins, types
        import diffusers_quantfix as qf
        other = types.ModuleType("other")
        exec("def raises():\\n    raise AttributeError(1)", vars(other))
        def trace(frame, event, argument):
            if frame.f_code.co_name == "traced":
                {mistake}
            return trace
        def looked_at(sys):
            def traced():
                return 1
            sys.settrace(trace)
            traced()
        builtins.looked_at = looked_at
        import lib.core
        sys.settrace(None)
        tell(state=states("fix-f"))
    """)
    assert asked.told == {"state": "failed"}


def test_an_error_of_a_function_that_gets_a_number_and_a_frame_is_no_signal() -> None:
    """Only the frame that called it, as Python calls a handler."""
    import sys

    from diffusers_quantfix.engine.interruptions import is_interruption

    def raising(number, frame):
        raise ValueError(number)

    try:
        raising(14, sys._getframe().f_back)
    except ValueError as error:
        assert not is_interruption(error)


def test_an_error_of_another_function_with_the_decorator_of_a_handler_is_no_signal(world) -> None:
    """All functions of one decorator have one code, and all objects of one class."""
    asked = world.run("""
        import functools, signal, sys
        from diffusers_quantfix.engine.interruptions import is_interruption
        def logged(function):
            def logs(*arguments):
                return function(*arguments)
            return logs
        class Logged:
            def __init__(self, function):
                self.function = function
            def __call__(self, *arguments):
                self.function(*arguments)
            def called(self, *arguments):
                self.function(*arguments)
        def deletes(number, frame):
            del number, frame
            raise ValueError
        def fails(*arguments):
            raise ValueError
        def answer(function, *arguments):
            try:
                function(*arguments)
            except ValueError as error:
                return is_interruption(error)
        def method(function):
            return Logged(function).called
        answers = []
        for kind in (logged, Logged, method, lambda f: functools.wraps(f)(logged(f))):
            signal.signal(signal.SIGUSR1, kind(deletes))
            answers += [answer(kind(fails)), answer(kind(fails), 10), answer(signal.raise_signal, signal.SIGUSR1)]
        tell(answers=answers)
    """)
    assert asked["answers"] == [False, False, True] * 4


def test_an_exit_that_code_asks_for_is_no_interruption() -> None:
    """Old releases exit in their own import."""
    import sys

    def raises():
        raise SystemExit

    for call in (lambda: sys.exit(), raises):
        with pytest.raises(SystemExit) as caught:
            call()
        assert not interruptions.is_interruption(caught.value)


@pytest.mark.parametrize(
    "statement", ["raise Violation", "raise Violation()", "try: 1 / 0\n    finally: raise Violation"]
)
def test_an_error_that_a_statement_raises_is_no_interruption(monkeypatch, statement) -> None:
    """Type checkers raise their errors in the code that they have checked, where no frame is theirs."""
    monkeypatch.setitem(sys.modules, "checker", types.ModuleType("checker"))
    violation = type("Violation", (Exception,), {"__module__": "checker"})
    checked = {"__name__": "lib.core", "Violation": violation}
    exec(f"def checked():\n    {statement}", checked)
    with pytest.raises(violation) as caught:
        checked["checked"]()
    assert not interruptions.is_interruption(caught.value)


LIMITS = """
    import ctypes, threading
    class Limit(Exception):
        pass
    class Told(Limit):
        def __init__(self):
            super().__init__("time is up")
    def limit(thread):
        while not hasattr(sys, "waits"):  # not within `Thread.start`, whose calls of C may raise errors of their own
            pass
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object({kind})) == 1
    sys.limit = limit
"""
FROM_A_THREAD = """\
    if not hasattr(sys, {where!r}):
        sys.{where} = 1
        other = threading.Thread(target=sys.limit, args=(threading.get_ident(),))
        other.start()
        sys.waits = True
        while True:
            pass
"""


@pytest.mark.parametrize("kind", ["Limit", "Told", "SystemExit", "TimeoutError"])
@pytest.mark.parametrize("where", ["broken", "patch"])
@pytest.mark.parametrize("order", [IMPORTED_TWICE, LIBRARY_FIRST], ids=["before", "after"])
def test_an_error_that_another_thread_puts_in(world, where, kind, order) -> None:
    """As the time limits of job queues do. It became "its probe failed"."""
    world.library()
    head, line, tail = (PROBE + PATCH).partition(f"def {where}(")
    rest = tail.partition("\n")
    world.fix(
        body=f"import sys, threading\n{head}{line}{rest[0]}\n{FROM_A_THREAD.format(where=where)}{rest[2]}"
    )
    raised = "except Limit" if kind == "Told" else f"except {kind}"
    order = order.replace("except BaseException", raised).replace("except TimeoutError", raised)
    assert world.run(LIMITS.format(kind=kind) + order.replace("str(raised)", "'mine'")).told == TOLD


def test_an_error_of_a_package_that_is_called_is_no_interruption() -> None:
    from packaging.version import InvalidVersion, Version

    from diffusers_quantfix.engine.interruptions import is_interruption

    for call in (lambda: Version("-"), lambda: int("-"), lambda: next(iter(()))):
        try:
            call()
        except (InvalidVersion, ValueError, StopIteration) as error:
            assert not is_interruption(error)
        else:
            raise AssertionError


def test_an_error_of_compiled_code_is_no_interruption() -> None:
    safetensors = pytest.importorskip("safetensors")
    from diffusers_quantfix.engine.interruptions import is_interruption

    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(b"")
    assert not is_interruption(caught.value)
