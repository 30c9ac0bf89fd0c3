"""GGUF models and their state dicts cannot be pickled.

Symptom: ``torch.save`` of a GGUF model or its state dict, ``pickle`` and a spawned process raise "RecursionError:
    maximum recursion depth exceeded".
Cause: ``torch.nn.Parameter.__reduce_ex__`` pickles ``self.data``, which is a GGUFParameter again: every torch function
    returns one. It would also lose the quantization type.
Upstream: not reported.
Patch: a ``GGUFParameter`` is rebuilt by its own constructor from its bytes and type; one of a subclass or with other
    attributes, by torch's functions. So the file needs diffusers and gguf, but not this package.
    ``torch.load(weights_only=True)`` needs ``GGUFParameter`` and ``gguf.GGMLQuantizationType`` in
    ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.rebuilt import rebuilt

FIX = Fix(
    __doc__,
    id="diffusers-gguf-pickle",
    module="diffusers.quantizers.gguf.utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "gguf": ""},
    since="0.1.0",
    patterns=("maximum recursion depth exceeded",),
    frames=("gguf/utils.py:__torch_function__", "gguf/utils.py:__new__", "GGUF"),
    hot=True,
)

# Set by its constructor; `_is_param` is torch's.
_OF_GGUF = {"quant_type", "quant_shape", "_is_param"}


def broken(utils: ModuleType) -> bool:
    """Is the data of a parameter, which torch pickles, a GGUFParameter again?"""
    import torch

    parameter_class = resolve(utils, "GGUFParameter")
    if parameter_class.__reduce_ex__ is not torch.nn.Parameter.__reduce_ex__:
        return False
    quant_type, (_, size) = next(iter(resolve(utils, "GGML_QUANT_SIZES").items()))
    parameter = parameter_class(torch.zeros(1, size, dtype=torch.uint8), quant_type=quant_type)
    return isinstance(parameter.data, parameter_class)


def patch(utils: ModuleType, draft: Draft) -> None:
    from torch._utils import _get_obj_state

    parameter_class = resolve(utils, "GGUFParameter")

    def make(original):
        def __reduce_ex__(self, proto):
            data, state = self.as_tensor().detach(), _get_obj_state(self)
            if type(self) is parameter_class and isinstance(state, dict) and state.keys() <= _OF_GGUF:
                return parameter_class, (data, self.requires_grad, self.quant_type)
            return rebuilt(self, data, state)

        return __reduce_ex__

    draft.wrap_plain(parameter_class, "__reduce_ex__", make)
