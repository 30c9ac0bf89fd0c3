"""Pickled 4-bit and 8-bit weights are restored as plain parameters.

Symptom: a model that was pickled, saved with ``torch.save(model)`` or sent to a spawned process works until it moves:
    then bytes and quant state, or CB and SCB, are on two devices ("Expected all tensors to be on the same device").
Cause: ``torch.nn.Parameter.__reduce_ex__`` always rebuilds a ``Parameter``, not the original class, and sets the
    attributes on it.
Upstream: none.
Patch: ``Params4bit`` and ``Int8Params`` are rebuilt by their own constructors, so that the file needs bitsandbytes and
    torch, but not this package. It contains the bytes of a weight once. ``torch.load(weights_only=True)`` needs these
    classes in ``torch.serialization.add_safe_globals``, as it needs QuantState and the layers of every pickled model.
    State dicts contain none of these classes and are not affected.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import params_4bit

FIX = Fix(
    id="bnb-params-pickle",
    title="pickling turns 4-bit and 8-bit weights into plain parameters",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    upstream=(),
    symptom="Expected all tensors to be on the same device, after torch.load or multiprocessing of a quantized model",
    patterns=("Expected all tensors to be on the same device",),
    frames=(r"torch\.load|serialization\.py", "pickle", "multiprocessing"),
    hot=True,
)

# The arguments of Int8Params's constructor besides the data.
_OF_8BIT = {"CB", "SCB", "has_fp16_weights"}


def broken(modules: ModuleType) -> bool:
    """Is a parameter rebuilt as another class?"""
    import torch

    for name in ("Params4bit", "Int8Params"):
        cls = resolve(modules, name)
        rebuild, arguments = cls(torch.zeros(1, dtype=torch.int8), requires_grad=False).__reduce_ex__(2)[:2]
        # ``in`` would compare a tensor with the class, which makes torch warn.
        if not any(part is cls for part in (rebuild, *arguments)):
            return True
    return False


def patch(modules: ModuleType, draft: Draft) -> None:
    from torch._tensor import _rebuild_from_type_v2

    def make_4bit(original):
        def __reduce_ex__(self, proto):
            params_4bit.unpack(self)
            # The parameter is created first and filled afterwards, since its layer refers back to it.
            state = {**vars(self), "data": self.data, "requires_grad": self.requires_grad}
            return type(self), (), state

        return __reduce_ex__

    def make_8bit(original):
        def __reduce_ex__(self, proto):
            data, held = self.data, dict(vars(self))
            matrix = held.get("CB")
            if matrix is not None and matrix.data_ptr() == data.data_ptr() and matrix.shape == data.shape:
                held["CB"] = data  # the same tensor, not another one of the same bytes
            if held.keys() == _OF_8BIT:
                arguments = (data, self.requires_grad, held["has_fp16_weights"], held["CB"], held["SCB"])
                return type(self), arguments
            # More than the constructor accepts; up to 0.43.1 that is always so, and the constructor drops the two
            # matrices.
            return _rebuild_from_type_v2, (type(self), type(self), (data, self.requires_grad), held)

        return __reduce_ex__

    draft.wrap_plain(resolve(modules, "Params4bit"), "__reduce_ex__", make_4bit)
    draft.wrap_plain(resolve(modules, "Int8Params"), "__reduce_ex__", make_8bit)
