"""Mends known defects of diffusers with quantized models, in the pinned releases that have them.

``import diffusers_quantfix`` is enough, before or after the libraries.  A fix is installed only where the release
is claimed and the defect is really there; `status` says for every fix what became of it and why.

    import diffusers_quantfix as qf

    print(qf.status())      # the board; .to_dict() for machines
    qf.revert()             # take everything back
    qf.apply()              # and install it again

    qf.audit(pipe)          # every tensor by device, companions of quantized weights included
    qf.release(pipe)        # free its memory now, whoever still points at it; `releasing` as a context manager
    qf.track(pipe)          # a context manager that samples the memory of a run

Importing this package loads nothing but itself while none of the libraries is imported.
"""

from .activation import activate, apply, revert, status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .memory import release, releasing, track
    from .placement import audit

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "audit", "release", "releasing", "revert", "status", "track"]

activate()

# The tools are imported when they are asked for.
_TOOLS = {"audit": "placement", "release": "memory", "releasing": "memory", "track": "memory"}


def __getattr__(name: str) -> object:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    tool = getattr(import_module(f"{__name__}.{_TOOLS[name]}"), name)
    globals()[name] = tool
    return tool


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
