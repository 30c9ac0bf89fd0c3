"""Every cast warns about modules that should stay in float32, although there are none.

Symptom: "There are modules in FluxTransformer2DModel that should be kept in float32: []. Casting directly with `to()`
    can lead to inconsistent results", from every ``.to(dtype)`` of every model.
Cause: ``ModelMixin.to`` creates a list of ``_keep_in_fp32_modules``, and then checks whether it is None.
Upstream: diffusers PR 13872 added the warning (0.39.0).
Patch: the warning is suppressed when the list is empty; for a model that has such modules it appears as before.
"""

from __future__ import annotations

from types import CodeType, ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, texts_of, written_in

FIX = Fix(
    id="diffusers-fp32-warning",
    title="every cast of a model warns about modules to be kept in float32, although there are none",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.39.0,<=0.42.1"},
    upstream=("https://github.com/huggingface/diffusers/pull/13872",),
    symptom="There are modules in FluxTransformer2DModel that should be kept in float32: []. Casting directly",
    harm="other",
    patterns=(r"that should be kept in float32: \[\]",),
)

_SAYS = "that should be kept in float32: "


def broken(modeling_utils: ModuleType) -> bool:
    """Look for the warning, and for the condition that is always true; a call would really warn."""
    to = resolve(modeling_utils, "ModelMixin.to")
    if _SAYS not in texts_of(to) or written_in(to, __name__):
        return False
    while to is not None:
        code = getattr(to, "__code__", None)
        if code is not None and any(_SAYS in str(constant) for constant in code.co_consts):
            return "fp32_modules is not None" in _source(code)
        to = getattr(to, "__wrapped__", None)
    return False


def _source(code: CodeType) -> str:
    """The lines of a function; ``inspect.getsource`` would parse the file, which takes each import 15 ms."""
    import linecache

    numbers = [line for _, _, line in code.co_lines() if line]
    return "".join(linecache.getlines(code.co_filename)[min(numbers) - 1 : max(numbers)])


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    import torch

    logger = modeling_utils.logger

    def make(original):
        def to(self, *args, **kwargs):
            if self._keep_in_fp32_modules or not names_dtype(args, kwargs):
                return original(self, *args, **kwargs)
            logger.addFilter(keep)
            try:
                return original(self, *args, **kwargs)
            finally:
                logger.removeFilter(keep)

        return to

    def names_dtype(args, kwargs):
        return "dtype" in kwargs or any(isinstance(value, torch.dtype) for value in args)

    def keep(record):
        return f"{_SAYS}[]." not in record.getMessage()

    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), "to", make)
