"""One CPU forward pass corrupts 4-bit layers on CPUs with AVX512-BF16.

Symptom: after a forward pass on such a CPU ``dequantize_4bit`` of the weight gives wrong values or raises "shape ... is
    invalid for input of size"; ``state_dict`` and ``save_pretrained`` write an absmax in the wrong order; after
    ``model.to("cuda")`` the output is garbage, without an error; a copy for training gets no gradients. Layers whose
    ``out_features`` is not a multiple of 32 raise "N must be divisible by block_n"; layers whose ``in_features`` is not
    a multiple of the block size raise "shape ... is invalid".
Cause: ``Linear4bit.forward`` repacks bytes and quant state in place for a CPU kernel. Only ``.cuda()``, ``.xpu()`` and
    ``state_dict`` undo it. The inverse does not restore the absmax of a state that is not nested, and quantizes the
    absmax of a nested one again.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2078;
    https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2083 patches ``.to()`` only. Both open.
Patch: the repacked quant state keeps the original one, so that the inverse is exact. This costs the bytes of absmax,
    while a copy of the weight would double the memory. Everything that uses the weight outside the kernel unpacks it
    first: moves, copies, pickles, state dicts, ``dequantize_4bit``, inputs with a gradient, ``train()``. Layers that
    the kernel does not support use the ordinary code path. The kernel is as fast as before. ``matmul_4bit``, where a
    repacked weight meets a gradient or a GPU, is wrapped when the first weight is repacked: until then this fix adds no
    frame to a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import params_4bit

FIX = Fix(
    __doc__,
    id="bnb-cpu-packing",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.49.0,<=0.50.2"},
    harm="wrong result",
    patterns=(
        "N must be divisible by block_n",
        r"shape '\[.{1,40}\]' is invalid for input of size",
        "a view of a leaf Variable that requires grad is being used in an in-place operation",
        "'QuantState' object has no attribute 'state2'",
    ),
    frames=("bitsandbytes/", "4.?bit", r"avx.?512|\bcpu\b"),
    hot=True,
)

_PACK = "_convert_weight_packed_for_cpu"
_UNPACK = "_convert_weight_packed_for_cpu_inverse"
_KEPT = params_4bit.UNPACKED
_ON_TRIAL = "_quantfix_trial"


def broken(modules: ModuleType) -> bool:
    """Repack a small weight and undo it; is the absmax in its old order?  Other CPUs never repack."""
    return resolve(modules, "has_avx512bf16")() and forgets(
        resolve(modules, _PACK), resolve(modules, _UNPACK), modules
    )


def forgets(pack: Callable[..., Any], unpack: Callable[..., Any], modules: ModuleType) -> bool:
    """Whether ``unpack`` does not restore the input of ``pack``; needs no CPU feature."""
    import torch

    state = resolve(modules, "QuantState")(
        absmax=torch.tensor([float(block) for block in range(64)]),
        shape=torch.Size((32, 128)),
        code=torch.zeros(16),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
    )
    setattr(state, _ON_TRIAL, True)  # not a layer's weight: its repacking needs no watching
    # Lists, not operators: each operator used for the first time costs the process a few hundred kilobytes.
    numbers = [[number % 251] for number in range(2048)]
    back, state = unpack(*pack(torch.tensor(numbers, dtype=torch.uint8), state))
    return not (back.tolist() == numbers and state.absmax.tolist() == list(range(64)))


def patch(modules: ModuleType, draft: Draft) -> None:
    import sys

    functional = sys.modules["bitsandbytes.functional"]
    watch = draft.on_demand(sys.modules["bitsandbytes.autograd._functions"], "matmul_4bit", make_matmul)

    def is_watched():
        return watch()

    # As torch.compiler.assume_constant_result does, which would import all of torch._dynamo: when the first weight is
    # repacked under torch.compile, this runs during tracing and causes no graph break.
    is_watched._dynamo_marked_constant = True  # type: ignore[attr-defined]
    wrap_functions(functional, draft, is_watched)
    linear4bit, params4bit = resolve(modules, "Linear4bit"), resolve(modules, "Params4bit")

    def first_unpack(original):
        def of_a_parameter(self, *args, **kwargs):
            params_4bit.unpack(self)
            return original(self, *args, **kwargs)

        return of_a_parameter

    def first_unpack_weight(original):
        def of_a_layer(self, *args, **kwargs):
            if isinstance(self.weight, params4bit):
                params_4bit.unpack(self.weight)
            return original(self, *args, **kwargs)

        return of_a_layer

    def make_train(original):
        def train(self, mode=True):
            # Upstream repacks no layer in training mode, and its kernel computes in bfloat16.
            if mode and isinstance(self.weight, params4bit):
                params_4bit.unpack(self.weight)
            return original(self, mode)

        return train

    # Some of them undo it themselves, but may be interrupted between the bytes and the quant state.
    for name in ("_load_from_state_dict", "_save_to_state_dict"):
        draft.wrap_plain(linear4bit, name, first_unpack_weight)
    draft.wrap_plain(linear4bit, "train", make_train)
    for name in ("to", "cuda", "xpu", "__getstate__"):
        draft.wrap_plain(params4bit, name, first_unpack)


def wrap_functions(functional: ModuleType, draft: Draft, is_watched: Callable[[], bool]) -> None:
    """Wrap the functions of ``bitsandbytes.functional`` that repack, undo it, and read what may be repacked.

    Args:
        is_watched: returns whether a repacked weight would be noticed; if not, no weight is repacked.
    """

    def make_pack(original):
        def _convert_weight_packed_for_cpu(qweight, quant_state, *args, **kwargs):
            if quant_state.shape[0] % 32 or quant_state.shape[1] % quant_state.blocksize:
                return qweight, quant_state  # the kernel does not support it: the ordinary code path is used
            if _ON_TRIAL not in vars(quant_state) and not is_watched():
                return qweight, quant_state
            before, packed = (object.__new__(type(quant_state)) for _ in range(2))
            vars(before).update(vars(quant_state))
            vars(packed).update(vars(quant_state))
            data, _ = original(qweight, packed, *args, **kwargs)
            # All at once: Ctrl-C in between would leave a state that fits neither bytes.
            quant_state.__dict__ = {**vars(packed), "dtype": before.dtype, _KEPT: before}
            return data, quant_state

        return _convert_weight_packed_for_cpu

    def make_unpack(original):
        def _convert_weight_packed_for_cpu_inverse(packed_weight, quant_state, *args, **kwargs):
            if _KEPT not in vars(quant_state):
                return original(packed_weight, quant_state, *args, **kwargs)
            data = params_4bit.unpacked_bytes(packed_weight, quant_state)
            params_4bit.restore(quant_state)
            return data, quant_state

        return _convert_weight_packed_for_cpu_inverse

    def make_dequantize(original):
        def dequantize_4bit(A, quant_state=None, *args, **kwargs):
            if quant_state is not None and _KEPT in quant_state.__dict__:
                # Bytes saved for a backward pass before the layer was repacked are not packed.
                if A.shape == (quant_state.shape[0], quant_state.shape[1] // 2):
                    A = params_4bit.unpacked_bytes(A, quant_state)
                quant_state = quant_state.__dict__[_KEPT]
            return original(A, quant_state, *args, **kwargs)

        return dequantize_4bit

    draft.wrap_plain(functional, _PACK, make_pack)
    draft.wrap_plain(functional, _UNPACK, make_unpack)
    draft.wrap_plain(functional, "dequantize_4bit", make_dequantize)


def make_matmul(original: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel computes no gradients and does not run on a GPU, where an assignment to ``parameter.data`` may put a
    weight."""
    import torch

    def matmul_4bit(A, B, quant_state, *args, **kwargs):
        gradients = A.requires_grad and torch.is_grad_enabled()
        if (gradients or A.device.type != "cpu") and _KEPT in getattr(quant_state, "__dict__", ()):
            if getattr(B, "quant_state", None) is quant_state:
                params_4bit.unpack(B)  # for all later passes too
                B = B.t()
            else:
                B, quant_state = params_4bit.unpacked_bytes(B, quant_state).t(), quant_state.__dict__[_KEPT]
        return original(A, B, quant_state, *args, **kwargs)

    return matmul_4bit
