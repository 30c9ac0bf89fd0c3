"""accelerate and torch.distributed load a checkpoint of quanto weights without effect.

Symptom: after ``load_checkpoint_in_model`` of a model quantized by quanto, or ``set_model_state_dict`` with
    ``full_state_dict=True``, the weights are unchanged; the biases are loaded. There is no error.
Cause: torch adds to the state dict what the checkpoint does not have: the layer's own parameter ``weight``, since the
    checkpoint has only its inner tensors, ``weight._data`` and others. A quanto layer that finds a ``weight`` ignores
    these.
Upstream: not reported.
Patch: if there are inner tensors of a weight, they are loaded. Those of one weight may be in two files of a checkpoint,
    which are loaded one after the other: what a file does not have is taken from the layer's weight, and still counts
    as missing for ``strict``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.unread import Used, unread

FIX = Fix(
    __doc__,
    id="quanto-checkpoint-load",
    module="optimum.quanto.nn.qmodule",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    harm="wrong result",
    frames=("load_checkpoint_in_model|set_model_state_dict|load_checkpoint_and_dispatch", "quanto"),
)


def broken(qmodule: ModuleType) -> bool:
    """Let a layer of two numbers load inner tensors next to its own weight; are they read?

    Nothing more: to make a weight of them, quanto would import the kernels of all kinds of weights.
    """
    import torch

    mixin = resolve(qmodule, "QModuleMixin")
    tensor_class, qint8 = resolve(qmodule, "WeightQBytesTensor"), resolve(qmodule, "qtypes")["qint8"]

    class Tiny(mixin, torch.nn.Linear):  # type: ignore[misc, valid-type]
        pass

    layer = Tiny.__new__(Tiny)
    torch.nn.Module.__init__(layer)
    layer.weight_qtype, layer.activation_qtype, layer.bias = qint8, None, None
    data, scale = torch.zeros(1, 2, dtype=torch.int8), torch.ones(1, 1)
    weight = tensor_class(qint8, 0, data.size(), data.stride(), data, scale, None)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    state = {"weight": layer.weight, "weight._data": unread(data + 1), "weight._scale": scale}
    try:
        layer._load_from_state_dict(state, "", {}, False, [], [], [])
    except Used:
        return False
    return not bool(layer.weight._data.any())


def patch(qmodule: ModuleType, draft: Draft) -> None:
    import inspect

    signature = inspect.signature(resolve(qmodule, "QModuleMixin._load_from_state_dict"))

    def make(original):
        def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
            name = f"{prefix}weight"
            whole = self.weight_qtype is not None and name in state_dict
            if whole and any(key.startswith(f"{name}._") for key in state_dict):
                state_dict = {key: value for key, value in state_dict.items() if key != name}
                given = signature.bind(self, state_dict, prefix, *args, **kwargs).arguments
                complete(self, state_dict, name, given["missing_keys"])
            original(self, state_dict, prefix, *args, **kwargs)

        return _load_from_state_dict

    def complete(layer, state_dict, name, missing_keys):
        """Add the missing parts of the weight to ``state_dict``, from the weight that ``layer`` has."""
        if not hasattr(layer.weight, "save_to_state_dict"):
            return  # not frozen
        data = "_data" if layer.weight_qtype.bits == 8 else "_data._data"
        names = [f"{name}.{part}" for part in (data, "_scale", "_shift")]
        if layer.weight_qtype.bits == 8:
            names.pop()
        missing = [key for key in names if key not in state_dict]
        if missing:
            own: dict[str, Any] = {}
            layer.weight.save_to_state_dict(own, f"{name}.", True)
            state_dict.update((key, own[key]) for key in missing)
            missing_keys.extend(missing)

    draft.wrap_plain(resolve(qmodule, "QModuleMixin"), "_load_from_state_dict", make)
