"""Every cast of a model warns about modules to be kept in float32, although there are none.

Symptom: "There are modules in FluxTransformer2DModel that should be kept in float32: []. Casting directly with `to()`
    can lead to inconsistent results", from every ``.to(dtype)`` of every model.
Cause: ``ModelMixin.to`` creates a list of ``_keep_in_fp32_modules``, and then checks whether it is None.
Upstream: https://github.com/huggingface/diffusers/pull/13872 added the warning (0.39.0).
Patch: the condition in the code of ``to`` is replaced by a check that the list is not empty. A model that has such
    modules still gets the warning.
"""

from __future__ import annotations

import contextlib
from types import FunctionType, ModuleType, SimpleNamespace

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged

FIX = Fix(
    __doc__,
    id="diffusers-fp32-warning",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.39.0,<=0.42.1"},
    harm="other",
    patterns=(r"that should be kept in float32: \[\]",),
)

_SAYS = "that should be kept in float32: "


def broken(modeling_utils: ModuleType) -> bool:
    """Call it for a stand-in without such modules, with our own logger instead of diffusers', and no imports."""
    import builtins

    import torch

    to = _warns(modeling_utils)
    if to is None:
        return False
    said: list[str] = []
    hooks = SimpleNamespace(_is_group_offload_enabled=lambda model: False)
    names = {
        **vars(modeling_utils),
        "logger": SimpleNamespace(warning=said.append),
        "__builtins__": {**vars(builtins), "__import__": lambda *args: hooks},
    }
    asked = FunctionType(to.__code__, names, to.__name__, to.__defaults__, to.__closure__)
    with contextlib.suppress(AttributeError, TypeError):  # the stand-in is not a model
        asked(SimpleNamespace(_keep_in_fp32_modules=None), dtype=torch.float32)
    return any(f"{_SAYS}[]" in text for text in said)


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    to = _warns(modeling_utils)
    if to is None:
        raise TargetMissing("ModelMixin.to does not warn about modules")
    draft.replace(to, "__code__", exchanged(to, "fp32_modules is not None", "fp32_modules"))


def _warns(modeling_utils: ModuleType) -> FunctionType | None:
    """``ModelMixin.to`` below its wrappers; not the innermost, since it is itself marked as a wrapper of torch's."""
    to = resolve(modeling_utils, "ModelMixin.to")
    while to is not None:
        if isinstance(to, FunctionType) and any(_SAYS in str(constant) for constant in to.__code__.co_consts):
            return to
        to = getattr(to, "__wrapped__", None)
    return None
