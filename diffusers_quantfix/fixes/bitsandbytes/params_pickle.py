"""Pickling turns 4-bit and 8-bit weights into plain parameters.

Symptom: a model that was pickled, saved with ``torch.save(model)`` or sent to a spawned process works until it is
    moved: then the bytes and the quant state, or CB and SCB, are on two devices ("Expected all tensors to be on the
    same device").
Cause: ``torch.nn.Parameter.__reduce_ex__`` always rebuilds a ``Parameter``, not the original class, and sets the
    attributes on it.
Upstream: none.
Patch: ``Params4bit`` and ``Int8Params`` are rebuilt by their own constructors, and weights of a subclass or with other
    attributes by torch's functions, so that the file needs bitsandbytes and torch, but not this package. It contains
    the bytes of a weight once. ``__getstate__`` and ``__setstate__`` of a subclass are called.
    ``torch.load(weights_only=True)`` needs these classes in ``torch.serialization.add_safe_globals``, as it needs
    QuantState and the layers of every pickled model, and ``torch._utils._set_obj_state`` for 4-bit weights with other
    attributes. State dicts contain none of these classes, except with ``keep_vars=True``. A process without this
    package cannot move an 8-bit model to a GPU that was pickled on the CPU, or is loaded with ``map_location="cpu"``:
    it leaves CB and SCB behind, as it does for a file that it wrote itself (`bnb-linear8bit-move`). Pickle the model
    while it is on the GPU, or use ``save_pretrained``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...weights import params_4bit
from ...weights.rebuilt import of_the_user, rebuilt, with_others

FIX = Fix(
    __doc__,
    id="bnb-params-pickle",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=("Expected all tensors to be on the same device",),
    frames=(r"torch\.load|serialization\.py", "pickle", "multiprocessing"),
    hot=True,
)

# The attributes of a 4-bit weight, including its data.
_OF_4BIT = {
    "blocksize",
    "bnb_quantized",
    "compress_statistics",
    "data",
    "module",
    "quant_state",
    "quant_storage",
    "quant_type",
    "requires_grad",
}
# Added by `bnb-4bit-checkpoint-names`; properties since 0.50.
_OF_A_STATE_DICT = {"absmax", "quant_map", "nested_absmax", "nested_quant_map"}
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
    from torch._utils import _get_obj_state

    class_4bit, class_8bit = resolve(modules, "Params4bit"), resolve(modules, "Int8Params")
    restored = sorted(names_used(class_4bit.__setstate__) & _OF_4BIT)
    known = {*restored, *_OF_A_STATE_DICT}

    def make_4bit(original):
        def __reduce_ex__(self, proto):
            params_4bit.unpack(self)
            cls = type(self)
            state = _get_obj_state(self)  # calls the class's ``__getstate__``
            if cls.__setstate__ is not class_4bit.__setstate__ or not isinstance(state, dict):
                # It may call that of Params4bit, which drops everything it does not know.
                return rebuilt(self, self.data, state, of_the_user(self, state, known))
            state = {"data": self.data, "requires_grad": self.requires_grad, **state}
            # The class's ``__setstate__`` drops these.
            others = {name: state.pop(name) for name in list(state) if name not in known}
            # It requires these.
            state.update((name, None) for name in restored if name not in state)
            # The parameter is created first and gets its state later, since its layer refers back to it; with its data,
            # which may be on meta here or where it is loaded: an empty one of the CPU could not take it.
            data = state["data"]
            created = cls, (data, self.requires_grad), state
            reduced = created if cls is class_4bit else rebuilt(self, data, state)
            return with_others(self, reduced, others) if others else reduced

        return __reduce_ex__

    def make_8bit(original):
        def __reduce_ex__(self, proto):
            data, state = self.data, _get_obj_state(self)
            if isinstance(state, dict):
                state = dict(state)
                matrix = state.get("CB")
                if matrix is not None and matrix.data_ptr() == data.data_ptr() and matrix.shape == data.shape:
                    state["CB"] = data  # the same tensor, not a second one with the same bytes
                if type(self) is class_8bit and state.keys() == _OF_8BIT:
                    named = [state[name] for name in ("has_fp16_weights", "CB", "SCB")]
                    return class_8bit, (data, self.requires_grad, *named)
            # More than the constructor accepts; up to 0.43.1 this is always so, and the constructor drops the two
            # matrices.
            return rebuilt(self, data, state)

        return __reduce_ex__

    draft.wrap_plain(class_4bit, "__reduce_ex__", make_4bit)
    draft.wrap_plain(class_8bit, "__reduce_ex__", make_8bit)
