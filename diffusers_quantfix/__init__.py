"""Patches known bugs of diffusers with quantized models, in affected releases.

``import diffusers_quantfix`` is enough, before or after the libraries.  A fix is installed only where its claim covers
the release and its probe finds the defect; `status` prints the state of every fix and the reason.

    import diffusers_quantfix as qf

    print(qf.status())      # the board; .to_dict() for machines
    qf.revert()             # remove every patch
    qf.apply()              # and install it again

    qf.audit(pipe)          # every tensor by device, companions of quantized weights included
    qf.release(pipe)        # free its memory now, even if it is still referenced; `releasing` is the context manager
    qf.track(pipe)          # a context manager that samples the memory of a run
    qf.keep_host_copies(pipe)  # model offload without copying unchanged weights back to the CPU

As long as none of the libraries is imported, importing this package loads two small modules.
"""

from .first_library import wait, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .activation import apply, revert, status
    from .memory import keep_host_copies, release, releasing, track
    from .placement import audit

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "apply",
    "audit",
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
        from .activation import activate

        activate()
    except Exception as error:
        import os

        if "strict" in os.environ.get("DIFFUSERS_QUANTFIX", ""):
            raise
        warn(f"activation failed, no fixes applied: {type(error).__name__}: {error}")


wait(wake)

# Public names that are imported at first use, and their modules.
_HOMES = {"apply": "activation", "revert": "activation", "status": "activation",
          "audit": "placement", "keep_host_copies": "memory", "release": "memory", "releasing": "memory",
          "track": "memory"}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
