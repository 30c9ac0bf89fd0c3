"""Patches known bugs of diffusers with quantized models, in affected releases.

``import diffusers_quantfix`` is enough, before or after the libraries.  A fix is installed only where the release
is claimed and the defect is really there; `status` says for every fix what became of it and why.

    import diffusers_quantfix as qf

    print(qf.status())      # the board; .to_dict() for machines
    qf.revert()             # remove every patch
    qf.apply()              # and install it again

    qf.audit(pipe)          # every tensor by device, companions of quantized weights included
    qf.release(pipe)        # free its memory now, whoever still points at it; `releasing` as a context manager
    qf.track(pipe)          # a context manager that samples the memory of a run

Importing this package loads two small modules while none of the libraries is imported.
"""

from .first_library import wait, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .activation import apply, revert, status
    from .memory import release, releasing, track
    from .placement import audit

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "audit", "release", "releasing", "revert", "status", "track"]


def wake() -> None:
    """Activate the package.  No fault of ours breaks an import of anyone, unless that was asked for."""
    try:
        from .activation import activate

        activate()
    except Exception as error:
        import os

        if "strict" in os.environ.get("DIFFUSERS_QUANTFIX", ""):
            raise
        warn(f"activation failed, no fixes applied: {type(error).__name__}: {error}")


wait(wake)

# What is imported when it is asked for, and where it is.
_HOMES = {"apply": "activation", "revert": "activation", "status": "activation",
          "audit": "placement", "release": "memory", "releasing": "memory", "track": "memory"}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
