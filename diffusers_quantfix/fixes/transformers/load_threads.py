"""Loading transformers models in threads changes torch for good.

Symptom: the global default dtype of torch, ``torch.get_default_dtype()``, is wrong permanently, fp16 or bf16, after
    concurrent loads of text encoders in two threads, or, before 4.49, after an exception when loading one with
    ``torch_dtype``: NaN in what the program computes.
Cause: while a model is made, ``from_pretrained`` sets the default dtype of the whole process, and then sets what it
    found: with two threads, the dtype of the other one.
Upstream: https://github.com/huggingface/transformers/issues/28461; 5.0 has another form of it, which is
    ``transformers-dtype-threads``.
Patch: one thread after the other makes its model, in its dtype; they load weights at once. After 30 seconds of waiting
    a thread goes on. A thread that makes layers and loads nothing has the dtype of another one's load, as before.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...loading.turns import Loads

FIX = Fix(
    __doc__,
    id="transformers-load-threads",
    module="transformers.modeling_utils",
    claims={"transformers": ">=4.44.2,<5.0.0"},
    harm="wrong result",
    fixed_in="transformers 5.0.0",
    asked_once=True,
)

_SETS = ("_set_default_dtype", "_set_default_torch_dtype")


def broken(modeling_utils: ModuleType) -> bool:
    """Does ``from_pretrained`` set the default dtype?"""
    held = vars(resolve(modeling_utils, "PreTrainedModel"))
    return any("set_default_dtype" in names_used(held[name]) for name in _SETS if name in held)


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    model, loads = resolve(modeling_utils, "PreTrainedModel"), Loads(modeling_utils.__name__, restoring=True)
    finally_restored = False  # from 4.49 on: whatever has changed it, the model's own code too

    def make_context(original):
        return contextlib.contextmanager(lambda *args, **kwargs: in_turn(original(*args, **kwargs)))

    def in_turn(context):
        """Entered by ``from_pretrained`` after the default dtype was set; the model is made in it."""
        dtype = loads.innermost()
        if dtype is not None and dtype.enters():
            dtype.take_turn()
            if finally_restored:
                dtype.remember()
        with context:
            yield

    def make_weights(original):
        def _load_pretrained_model(*args, **kwargs):
            """Before it, upstream's code has restored what it changed."""
            dtype = loads.innermost()
            if dtype is not None and finally_restored:
                dtype.restore()
            elif dtype is not None:
                dtype.is_restored()
            return original(*args, **kwargs)

        return _load_pretrained_model

    for name, make in (("from_pretrained", loads.loading), ("_from_config", loads.at_once)):
        restoring = _restoring(vars(model)[name])
        if restoring is not None:
            finally_restored = True
            draft.replace(restoring, "__code__", _called(None).__code__)
        draft.wrap_plain(model, name, make)
    draft.wrap_plain(model, next(name for name in _SETS if name in vars(model)), loads.setting)
    draft.wrap_plain(model, "_load_pretrained_model", make_weights)
    draft.wrap_plain(modeling_utils, "no_init_weights", make_context)


def _restoring(method: Any) -> Any:
    """The function around upstream's, which finally sets the default dtype that it found: of another thread."""
    function = getattr(method, "__func__", method)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_freevars == ("func",) and "set_default_dtype" in code.co_names:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def _called(func: Any) -> Any:
    def _wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return _wrapper
