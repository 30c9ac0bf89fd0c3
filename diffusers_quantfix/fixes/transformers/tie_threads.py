"""Models that are loaded in threads are not tied.

Symptom: after two threads have loaded text encoders at once, the embeddings are empty, for good in that process.
    ``torch.linspace`` ignores ``with torch.device("cuda")``, also with one thread, and the functions of
    ``torch.nn.init`` do nothing.
Cause: while a model is made, ``PreTrainedModel.tie_weights`` and functions of torch are replaced for the whole process,
    and then what was found before is put back: with two threads, the replacement of the other one. Meanwhile the other
    thread's model is not tied when its loading ends.
Upstream: https://github.com/huggingface/transformers/pull/44940.
Patch: they are replaced for the thread alone that makes a model.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...engine.target import finished
from ...models.own_thread import in_own_thread, replaced

FIX = Fix(
    __doc__,
    id="transformers-tie-threads",
    module="transformers.initialization",
    claims={"transformers": ">=5.0.0,<=5.24.0"},
    patterns=(r"tie_weights.{0,1000}[Tt]hread", r"[Tt]hread.{0,1000}tie_weights"),
    frames=("threading.py|concurrent/futures/thread.py", "transformers", "meta"),
    asked_once=True,
)

_TIED, _NO_TIE = "tie_weights", "no_tie_weights"
_GUARD, _SAFE = "guard_torch_init_functions", "meta_device_safe_creation_ops"
_DECORATED = "initialize_weights"


def broken(initialization: ModuleType) -> bool:
    """Does ``no_tie_weights`` set an attribute of the class, or the guard one of torch?"""
    if _NO_TIE in vars(initialization):
        return _TIED in names_used(resolve(initialization, _NO_TIE))
    return "setattr" in names_used(resolve(initialization, _GUARD))  # 5.0.0


def patch(initialization: ModuleType, draft: Draft) -> None:
    def make(original):
        @contextlib.contextmanager
        def no_tie_weights():
            from transformers.modeling_utils import PreTrainedModel

            with replaced(PreTrainedModel, _TIED, lambda *args, **kwargs: None):
                yield

        return no_tie_weights

    if _NO_TIE in vars(initialization):
        draft.wrap_plain(initialization, _NO_TIE, make)
    draft.wrap_plain(initialization, _GUARD, in_own_thread)
    if _SAFE in vars(initialization):
        draft.wrap_plain(initialization, _SAFE, _safe)
    model = getattr(finished("transformers.modeling_utils"), "PreTrainedModel", None)
    if model is not None and _guarded(vars(model).get(_DECORATED)) is not None:
        draft.wrap_plain(model, _DECORATED, _guarded_anew)


def _safe(original: Any) -> Any:
    in_thread = in_own_thread(original)

    @contextlib.contextmanager
    def meta_device_safe_creation_ops() -> Iterator[None]:
        # torch keeps the functions that ``with torch.device()`` is for, as it finds them the first time.
        constructors = getattr(importlib.import_module("torch.utils._device"), "_device_constructors", None)
        if constructors is not None:
            constructors()
        with in_thread():
            yield

    return meta_device_safe_creation_ops


def _guarded(method: Any) -> Any:
    """The part of a method that upstream's context manager is around, if the libraries were imported first."""
    part = getattr(method, "__wrapped__", None)  # in torch.no_grad
    return part if _guard(part) is not None and hasattr(part, "__wrapped__") else None


def _guard(part: Any) -> Any:
    for cell in getattr(part, "__closure__", None) or ():
        function = getattr(cell.cell_contents, "func", None)
        if getattr(function, "__name__", "") == _GUARD:
            return function
    return None


def _guarded_anew(method: Any) -> Any:
    import torch

    part = _guarded(method)
    return torch.no_grad()(in_own_thread(_guard(part))()(part.__wrapped__))
