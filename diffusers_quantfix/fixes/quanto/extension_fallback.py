"""quanto int4 and int2 weights need a working compiler.

Symptom: the first forward pass (or move, or load) of a model with int4 or int2 weights raises RuntimeError "Error
    building extension 'quanto_cpp'" or 'quanto_cuda', "Ninja is required to load C++ extensions", "CUDA_HOME
    environment variable is not set" or "identifier `__asm__` is undefined" (0.2.6, 0.2.7). 0.2.5 falls back to Python
    for unpacking, but compiles again, and fails, at every call.
Cause: ``Extension.lib`` compiles C++ or CUDA code on the user's machine, and lets every failure through.
Upstream: https://github.com/huggingface/optimum-quanto/issues/353,
    https://github.com/huggingface/optimum-quanto/issues/360 and
    https://github.com/huggingface/optimum-quanto/issues/386, https://github.com/huggingface/diffusers/issues/10467; the
    project is dormant.
Patch: ``Extension.lib`` makes one attempt per process. When it fails, one warning says why, and PyTorch does the work:
    the extension is only a faster way to unpack and to multiply. On Windows nothing is compiled unless
    ``DIFFUSERS_QUANTFIX=quanto:build`` asks for it, and then with the flags that Microsoft's compiler needs;
    ``quanto:no-build`` compiles nothing anywhere.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.interruptions import heed_interruption
from ...engine.locks import Lock
from ...engine.probe import resolve
from ...weights import quanto_extension

FIX = Fix(
    __doc__,
    id="quanto-extension-fallback",
    module="optimum.quanto.library.extensions.extension",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        "(Error building extension '|TORCH_EXTENSION_NAME=)quanto_(cpp|cuda)",
        r"Ninja is required to load C\+\+ extensions",
        "CUDA_HOME environment variable is not set",
    ),
    frames=("optimum/quanto/", "qint4|qint2|int4|int2"),
    hot=True,
    options={
        quanto_extension.BUILD: "compile quanto's extensions on Windows too, with the flags needed there",
        quanto_extension.NO_BUILD: "never compile quanto's extensions; PyTorch unpacks and multiplies",
    },
)

_STAND_IN = "_quantfix_stand_in"
_TELLING = ("error:", "error ", "not found", "no such file", "undefined", "cannot ", "denied", "is required")


def broken(extension: ModuleType) -> bool:
    """Does the property itself call ``load``, without a wrapper?"""
    return "load" in resolve(extension, "Extension.lib").fget.__code__.co_names


def patch(extension: ModuleType, draft: Draft) -> None:
    lock = Lock()

    def make(original):
        def lib(self):
            if self._lib is not None:
                return self._lib
            # Kept on the extension: one attempt per process, even after the fix was reverted and applied again.
            known = vars(self).get(_STAND_IN)
            if known is None:
                with lock.held:
                    known = vars(self).get(_STAND_IN) or attempt(self)
            return known

        def attempt(self):
            reason, level = quanto_extension.why_not_to_build(draft.options()), "info"
            if not reason:
                upstream_flags = self.extra_cuda_cflags
                try:
                    if upstream_flags is not None:
                        self.extra_cuda_cflags = [
                            *upstream_flags,
                            *quanto_extension.flags_of_this_platform(),
                        ]
                    return original.fget(self)
                except Exception as error:
                    heed_interruption(error)
                    if self._lib is not None:  # it is loaded; only its version could not be recorded
                        return self._lib
                    reason, level = f"could not be compiled: {first_line_of_the_cause(error)}", "warning"
                finally:
                    self.extra_cuda_cflags = upstream_flags
            tell(level, f"{self.name} {reason}")
            stand_in = quanto_extension.StandIn(self.name, reason)
            setattr(self, _STAND_IN, stand_in)
            return stand_in

        return property(lib, doc=original.__doc__)

    draft.wrap_plain(resolve(extension, "Extension"), "lib", make)


def first_line_of_the_cause(error: BaseException) -> str:
    """The line of a compiler's log that says what is wrong, or else the first line of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        # Skip the heading, which contains the first command, and commands, which are long and may contain any word.
        if line.startswith("Error building extension") or len(line) > 300:
            continue
        if any(word in line.lower() for word in _TELLING):
            return line
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def tell(level: str, sentence: str) -> None:
    import logging

    logger = logging.getLogger(__name__.partition(".")[0])
    getattr(logger, level)(
        "%s; PyTorch unpacks int4 and int2 weights and multiplies instead: same results, slower", sentence
    )
