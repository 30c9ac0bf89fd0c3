"""Pickled 4-bit and 8-bit weights come back as plain parameters.

Symptom: a model that was pickled, saved with ``torch.save(model)`` or sent to a spawned process works until it moves:
    then bytes and quant state, or CB and SCB, are on two devices ("Expected all tensors to be on the same device").
Cause: ``torch.nn.Parameter.__reduce_ex__`` rebuilds a ``Parameter``, whatever the class was, and hangs the attributes
    on it.
Upstream: none.
Patch: ``Params4bit`` and ``Int8Params`` say how they are rebuilt: by their own constructors, so that the file needs
    bitsandbytes and torch and nothing of this package. The bytes of a weight are in it once.
    ``torch.load(weights_only=True)`` wants to be told these classes, ``torch.serialization.add_safe_globals``, as it
    wants QuantState and the layers of every pickled model; state dicts have none of them and are not concerned.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import params_4bit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ...engine.draft import Draft

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

# What the constructor of Int8Params takes besides the data.
_OF_8BIT = {"CB", "SCB", "has_fp16_weights"}


def broken(modules: ModuleType) -> bool:
    """Does a parameter say that it is rebuilt as something else?"""
    import torch

    for name in ("Params4bit", "Int8Params"):
        cls = resolve(modules, name)
        rebuild, arguments = cls(torch.zeros(1, dtype=torch.int8), requires_grad=False).__reduce_ex__(2)[:2]
        # ``in`` would compare a tensor with the class, of which torch warns.
        if not any(part is cls for part in (rebuild, *arguments)):
            return True
    return False


def patch(modules: ModuleType, draft: Draft) -> None:
    from torch._tensor import _rebuild_from_type_v2

    def make_4bit(original):
        def __reduce_ex__(self, proto):
            params_4bit.unpack(self)
            # The parameter is made first and filled then, since its layer leads back to it.
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
            # More than the constructor knows; up to 0.43.1 that is so for all, which then forgets the two matrices.
            return _rebuild_from_type_v2, (type(self), type(self), (data, self.requires_grad), held)

        return __reduce_ex__

    draft.wrap_plain(resolve(modules, "Params4bit"), "__reduce_ex__", make_4bit)
    draft.wrap_plain(resolve(modules, "Int8Params"), "__reduce_ex__", make_8bit)
