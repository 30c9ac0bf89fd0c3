"""from_single_file while another thread loads a model takes that thread's dtype.

Symptom: a model of ``from_single_file`` without ``torch_dtype`` is in bfloat16 or float16 at times, with no error, in
    programs that load several models at once in threads.
Cause: the model is made in the default dtype of the process, which ``from_pretrained`` of diffusers and transformers
    sets to ``torch_dtype`` while it makes its own. Its weights are then loaded in the dtype in which it was made.
Upstream: not reported for single files; https://github.com/huggingface/diffusers/issues/14347 is about
    ``from_pretrained``.
Patch: it makes its model when no other load makes one, as ``diffusers-load-threads`` does.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, names_used, resolve
from ...loading.turns import turn

FIX = Fix(
    __doc__,
    id="diffusers-single-file-threads",
    module="diffusers.loaders.single_file_model",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "accelerate": ""},
    harm="wrong result",
    asked_once=True,
)

_CONTEXT = "init_empty_weights"
_TEXT_ENCODERS = "diffusers.loaders.single_file_utils"


def broken(single_file_model: ModuleType) -> bool:
    """Is the model made by ``from_config`` in a context manager alone, and are weights loaded in its dtype?"""
    names = names_used(resolve(single_file_model, "FromOriginalModelMixin.from_single_file"))
    loaded = function_of(resolve(single_file_model, "load_model_dict_into_meta")).__code__
    # Before 0.33 they are loaded in float32.
    return {_CONTEXT, "from_config"} <= names and "old_param" in loaded.co_varnames


def patch(single_file_model: ModuleType, draft: Draft) -> None:
    def make(original):
        return contextlib.contextmanager(lambda *args, **kwargs: in_turn(original(*args, **kwargs)))

    def in_turn(context):
        with turn(), context:
            yield

    draft.wrap_plain(single_file_model, _CONTEXT, make)
    draft.wrap_plain(sys.modules[_TEXT_ENCODERS], _CONTEXT, make)
