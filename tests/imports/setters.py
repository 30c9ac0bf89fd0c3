"""A process that imports every patched module with a hook in every setter of process-wide state.

Prints one JSON object: the setters that this package called, directly or through a library, with the place; the setters
that have a hook; those whose hook saw a call that pretends to be the package's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from typing import Any

OURS = "diffusers_quantfix"
SETTERS = {
    "gc": "collect disable enable freeze set_debug set_threshold unfreeze",
    "sys": "setprofile setrecursionlimit setswitchinterval settrace",
    "warnings": "catch_warnings filterwarnings resetwarnings simplefilter",
    "logging": "basicConfig captureWarnings disable setLoggerClass",
    "logging.Logger": "addFilter addHandler removeFilter removeHandler setLevel",
    "os": "chdir umask",
    "signal": "signal set_wakeup_fd setitimer",
    "locale": "setlocale",
    "random": "seed setstate",
    "numpy.random": "seed set_state",
    "threading.Thread": "start",
    "torch": "manual_seed seed set_anomaly_enabled set_default_device set_default_dtype set_default_tensor_type "
    "set_deterministic_debug_mode set_float32_matmul_precision set_flush_denormal set_num_interop_threads "
    "set_num_threads set_printoptions set_rng_state set_warn_always use_deterministic_algorithms",
    "torch.random": "fork_rng manual_seed seed set_rng_state",
    "torch._C": "_set_default_dtype _set_default_tensor_type _set_deterministic_algorithms "
    "_set_deterministic_fill_uninitialized_memory _set_float32_matmul_precision _set_warnAlways "
    "_cuda_init set_num_threads",
    "torch.cuda": "init manual_seed manual_seed_all set_device set_rng_state",
    "torch.utils._device.DeviceContext": "__enter__",
}
EVENTS = (
    "os.putenv",
    "os.unsetenv",
    "os.chdir",
    "os.fork",
    "os.mkdir",
    "os.remove",
    "subprocess.Popen",
    "socket.",
)

calls: list[str] = []


def caller() -> str:
    """The file and line of the package from which a call comes; empty if a library's module makes it on its own."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] == OURS:
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        if frame.f_code.co_name == "<module>":
            return ""
        frame = frame.f_back
    return ""


def hook(owner: Any, path: str, name: str) -> None:
    original = getattr(owner, name)

    def called(*args: Any) -> None:
        about = getattr(args[0], "name", "") if args and path == "logging.Logger" else ""
        by = caller()
        if by and about.partition(".")[0] != OURS:
            calls.append(f"{path}.{name} {by}")

    if isinstance(original, type):  # a class stays one
        enter = original.__enter__
        original.__enter__ = lambda self: (called(self), enter(self))[1]
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        called(*args)
        return original(*args, **kwargs)

    setattr(owner, name, hooked)


def owner_of(path: str) -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module(path)
    parent, _, name = path.rpartition(".")
    return getattr(importlib.import_module(parent), name)


def audit(event: str, args: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event.startswith(EVENTS):
        by = caller()
        if by:
            calls.append(f"{event} {args[0] if args else ''} {by}")


def main() -> None:
    import numpy.random  # noqa: F401
    import torch  # noqa: F401

    hooked = []
    for path, names in SETTERS.items():
        owner = owner_of(path)
        for name in names.split():
            if hasattr(owner, name):
                hook(owner, path, name)
                hooked.append(f"{path}.{name}")
    sys.addaudithook(audit)
    import diffusers_quantfix
    from diffusers_quantfix.fixes import MODULES

    for target in sorted(MODULES):
        with contextlib.suppress(Exception):
            importlib.import_module(target)
    states = [fix.state for fix in diffusers_quantfix.status(load=False)]
    found, calls[:] = list(calls), []
    pretend(hooked)
    print(
        json.dumps({"calls": found, "applied": states.count("applied"), "hooked": hooked, "pretended": calls})
    )


def pretend(hooked: list[str]) -> None:
    """Call each setter as a module of the package would; what it does does not matter any more."""
    names = {"__name__": f"{OURS}.pretend", "owner_of": owner_of}
    for path in hooked:
        owner, _, name = path.rpartition(".")
        use = (
            f"with owner_of({owner!r}).{name}(*arguments): pass"
            if name == "catch_warnings"
            else (f"owner_of({owner!r}).{name}(*arguments)")
        )
        code = compile(f"def call(*arguments):\n    {use}", "pretend.py", "exec")
        exec(code, names)
        for count in range(4):
            with contextlib.suppress(BaseException):
                names["call"](*[None] * count)


main()
