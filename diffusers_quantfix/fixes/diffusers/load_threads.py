"""Loading a model changes torch for other threads, and for good.

Symptom: the default dtype of torch, ``torch.get_default_dtype()``, is wrong permanently, that of a model, after
    concurrent loads in two threads, or after an exception when loading a model with ``torch_dtype``: NaN, or buffers in
    another model's dtype. Layers that another thread makes meanwhile are uninitialised.
Cause: while a model is made, ``ModelMixin.from_pretrained`` sets the default dtype and replaces the functions of
    ``torch.nn.init``, both for the whole process. It then sets the dtype that it found: with two threads, that of the
    other one. After an error it sets none.
Upstream: not reported; in transformers: https://github.com/huggingface/transformers/issues/28461.
Patch: one thread after the other makes its model, in its dtype; they load weights at once. After 30 seconds of waiting
    a thread goes on. The dtype is restored after an error too, and only layers of the thread that loads are left
    uninitialised.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...loading.turns import Loads
from ...models.own_thread import in_own_thread

FIX = Fix(
    __doc__,
    id="diffusers-load-threads",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="wrong result",
    asked_once=True,
)

_SETS = "_set_default_torch_dtype"


def broken(modeling_utils: ModuleType) -> bool:
    """Does ``from_pretrained`` set the default dtype?"""
    return "set_default_dtype" in names_used(resolve(modeling_utils, f"ModelMixin.{_SETS}"))


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    model, loads = resolve(modeling_utils, "ModelMixin"), Loads(modeling_utils.__name__, restoring=False)

    def make_context(original):
        skipped = in_own_thread(original)

        @contextlib.contextmanager
        def no_init_weights():
            """Entered right after the default dtype was set; the model is made in it."""
            dtype = loads.innermost()
            if dtype is None or not dtype.enters():  # of a program's own
                with skipped():
                    yield
                return
            try:
                dtype.take_turn()
                with skipped():
                    yield
            finally:
                dtype.restore()

        return no_init_weights

    draft.wrap_plain(model, "from_pretrained", loads.loading)
    draft.wrap_plain(model, _SETS, loads.setting)
    draft.wrap_plain(modeling_utils, "no_init_weights", make_context)
