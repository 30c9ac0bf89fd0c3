"""Patches known bugs of diffusers with quantized models, in affected releases.

``import diffusers_quantfix`` is enough, before or after the libraries.  A fix is installed only where its claim covers
the release and its probe finds the bug; `status` prints the state of every fix and the reason.

    import diffusers_quantfix as qf

    print(qf.status())      # the board; .to_dict() for programs
    qf.revert()             # remove every patch
    qf.apply()              # and install it again

    qf.audit(pipe)          # every tensor by device, companions of quantized weights included
    qf.release(pipe)        # free its memory now, even if variables still refer to it; `releasing`: after a block
    qf.track(pipe)          # a context manager that samples the memory of a run
    qf.keep_host_copies(pipe)  # model offload without copying unchanged weights back to the CPU
    qf.dequantize_lora_layers(pipe)  # then fuse_lora() of a GGUF model works

Until one of the libraries is imported, importing this package loads only this small module.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .activation import apply, revert, status
    from .dequantizing import dequantize_lora_layers
    from .memory import keep_host_copies, release, releasing, track
    from .placement import audit

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "apply",
    "audit",
    "dequantize_lora_layers",
    "keep_host_copies",
    "release",
    "releasing",
    "revert",
    "status",
    "track",
]


def wake() -> None:
    """Activate the package.  An error here never breaks an import of other code, except under ``strict``."""
    try:
        from . import forked  # noqa: F401  # before any other module
        from .activation import activate

        activate()
    except Exception as error:
        if _strict() or _is_theirs(error):
            raise
        try:
            from .first_library import warn

            warn(f"activation failed, no fixes applied: {type(error).__name__}: {error}")
        except Exception:  # that file is damaged too
            pass


def _is_theirs(error: Exception) -> bool:
    """Whether the program raised it in the middle of our code."""
    try:
        from .engine.interruptions import is_interruption

        return is_interruption(error)
    except Exception:  # that file is damaged
        return False


def _strict() -> bool:
    import os

    return "strict" in os.environ.get("DIFFUSERS_QUANTFIX", "")


# Every library with a patched module, and the patched modules of torch, which torch does not import itself: a program
# without quantized models pays nothing.  A test compares them with the fixes.
_WAITED_FOR = {
    "accelerate",
    "bitsandbytes",
    "diffusers",
    "optimum",
    "peft",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torchao",
    "transformers",
}


def _first_library(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
    """A finder that finds nothing itself.  When one of the libraries is about to be imported, it activates the package.

    It is a function because a class would slow down every start more.
    """
    if name in _WAITED_FOR:
        try:
            from .first_library import found
        except Exception:  # deleted while the process ran, or damaged by an interrupted upgrade
            return None
        return found(_first_library, name, path, target)
    return None


def _wait() -> None:
    """Wait for the first library.  Loads no other module where there cannot be a setting, a library or an earlier copy.

    ``sys`` and ``environ`` are not globals of this module: modules that a finder references through its globals outlive
    the other modules at interpreter shutdown and are cleared one by one, which costs a percent of a bare start.
    """
    import sys
    from os import environ

    here = "typing" in sys.modules or not _WAITED_FOR.isdisjoint(sys.modules)
    # An earlier copy that has been used, and no longer waits, has imported typing. Other finders may raise on any
    # attribute access.
    function: Any = type(_wait)
    meta_path: list[Any] = sys.meta_path
    earlier = any(type(one) is function and one.__name__ == "_first_library" for one in meta_path)
    if here or earlier or "DIFFUSERS_QUANTFIX" in environ:
        from .first_library import wait

        wait(_first_library, _WAITED_FOR)  # at the position of an earlier copy of the package
    else:
        sys.meta_path.insert(0, _first_library)  # type: ignore[arg-type]  # has `find_spec`


vars(_first_library).update(find_spec=_first_library, wake=wake, woken=False)
try:
    _wait()
except Exception as error:  # a damaged file, or something strange on sys.meta_path
    if _strict() or _is_theirs(error):
        raise
    wake()

# Public names that are imported on first use, and their modules.
_HOMES = {"apply": "activation", "revert": "activation", "status": "activation",
          "audit": "placement", "dequantize_lora_layers": "dequantizing",
          "keep_host_copies": "memory", "release": "memory", "releasing": "memory", "track": "memory"}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in (_HOMES or ()):  # None when the interpreter has cleared this module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import sys

        shutting_down = sys.meta_path is None
    except ImportError:
        shutting_down = True
    if shutting_down:  # in a destructor
        raise ImportError(
            f"{__name__}.{name} was not used before the interpreter began to shut down, and cannot be imported any more"
        )
    from _imp import acquire_lock, release_lock
    from importlib import import_module

    # The lock that the import system holds while it asks a finder. `_first_library` imports these modules under it: a
    # thread that imports them without it would keep their import locks and wait for this one, and the finder's thread
    # the other way round.
    acquire_lock()
    try:
        import_module(f"{__name__}.forked")  # before any other module
        activation = import_module(f"{__name__}.activation")
    finally:
        release_lock()
    home = import_module(f"{__name__}.{_HOMES[name]}")
    if not hasattr(activation, "_watcher") or not hasattr(home, name):
        raise ImportError(
            f"{__name__}.{name} cannot be used yet: the import of the package was interrupted, as by a signal handler "
            "or a destructor, and is not finished"
        )
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
