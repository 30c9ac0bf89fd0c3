"""Models without input embeddings cannot be loaded with torchao.

Symptom: ``from_pretrained`` of ClapModel, or of Kandinsky's MultilingualCLIP, with ``TorchAoConfig`` raises
    NotImplementedError "`get_input_embeddings` not auto-handled for ClapModel"; with transformers 5 RuntimeError "We
    encountered some issues during automatic conversion of the weights". Without the config they load.
Cause: for each weight that it quantizes, torchao's quantizer asks the model for its input embeddings, to see whether
    the weight is theirs. A model with several encoders, or with one under another name, raises.
Upstream: not reported; transformers 4.51.3 does not ask.
Patch: while such a model is loaded, it answers that it has none.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_in, names_used, resolve, unimported_code

FIX = Fix(
    __doc__,
    id="transformers-torchao-embeddings",
    module="transformers.quantizers.quantizer_torchao",
    claims={"transformers": ">=4.52.1,<=5.24.0", "torchao": ""},
    patterns=("not auto.handled for",),
    frames=("transformers/quantizers/quantizer_torchao.py", "transformers/integrations/torchao.py"),
    since="0.1.0",
    asked_once=True,
)

_NAME = "get_input_embeddings"


def broken(quantizer_torchao: ModuleType) -> bool:
    """Does the function that quantizes a weight ask for the embeddings, without catching the error?"""
    cls = resolve(quantizer_torchao, "TorchAoHfQuantizer")
    resolve(cls, "_process_model_before_weight_loading")
    resolve(cls, "_process_model_after_weight_loading")
    if hasattr(cls, "create_quantized_param"):  # transformers 4
        names = names_used(resolve(cls, "create_quantized_param"))
    else:  # in a module that transformers imports for a torchao model
        names = names_in(unimported_code("transformers.integrations.torchao", "TorchAoQuantize.convert"))
    return _NAME in names and "NotImplementedError" not in names


def patch(quantizer_torchao: ModuleType, draft: Draft) -> None:
    cls = resolve(quantizer_torchao, "TorchAoHfQuantizer")

    def make_before(original):
        def _process_model_before_weight_loading(self, model, *args, **kwargs):
            if _raises(model):
                vars(model)[_NAME] = _none
            return original(self, model, *args, **kwargs)

        return _process_model_before_weight_loading

    def make_after(original):
        def _process_model_after_weight_loading(self, model, *args, **kwargs):
            if vars(model).get(_NAME) is _none:
                del vars(model)[_NAME]
            return original(self, model, *args, **kwargs)

        return _process_model_after_weight_loading

    draft.wrap_plain(cls, "_process_model_before_weight_loading", make_before)
    draft.wrap_plain(cls, "_process_model_after_weight_loading", make_after)


def _raises(model: Any) -> bool:
    if not isinstance(model, sys.modules["torch"].nn.Module) or not hasattr(model, _NAME):
        return False
    try:
        model.get_input_embeddings()
    except NotImplementedError:
        return True
    return False


def _none() -> None:
    """The embeddings of a model that has none."""
