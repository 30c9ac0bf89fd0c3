"""Models loaded in threads leave another default dtype behind.

Symptom: the global default dtype of torch, ``torch.get_default_dtype()``, is wrong permanently, that of a model, after
    concurrent loads of transformers models in two threads: NaN in what the program computes, or parts of a model in
    another one's dtype.
Cause: ``local_torch_dtype`` sets the default dtype of the whole process while a model is made, and then sets what it
    found: with two threads, the dtype of the other one.
Upstream: not reported; in a program: https://github.com/vectorize-io/hindsight/issues/2162.
Patch: one thread after the other makes its model; they load weights at once. After 30 seconds of waiting a thread goes
    on.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...loading.turns import restoring_turn

FIX = Fix(
    __doc__,
    id="transformers-dtype-threads",
    module="transformers.modeling_utils",
    claims={"transformers": ">=5.0.0,<=5.24.0"},
    harm="wrong result",
    asked_once=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """Does ``local_torch_dtype`` set the default dtype?"""
    return "set_default_dtype" in names_used(resolve(modeling_utils, "local_torch_dtype"))


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        return contextlib.contextmanager(lambda *args, **kwargs: in_turn(original(*args, **kwargs)))

    def in_turn(context):
        with restoring_turn(), context:
            yield

    draft.wrap_plain(modeling_utils, "local_torch_dtype", make)
