"""Moving a 4-bit bitsandbytes parameter without changing the source parameter.

A ``Params4bit`` is a tensor of packed bytes with a ``QuantState``, and often a reference to its layer, which refers to
the quant state too. Several fixes create a parameter on another device from an existing one; they share these
functions, so that each fix works alone and with the others, in any order.

On CPUs with AVX512-BF16, bitsandbytes >= 0.49 repacks bytes and quant state for its CPU kernel (``bnb-cpu-packing``).
The repacked quant state keeps the original one under ``UNPACKED``; code that uses the bytes outside that kernel unpacks
them first.

Neither torch nor bitsandbytes is imported here: if there is a 4-bit parameter, both are already imported.

Upstream: bitsandbytes/nn/modules.py (``Params4bit``), bitsandbytes/functional.py (``_convert_weight_packed_for_cpu``).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "UNPACKED",
    "belongs_to_layer",
    "follow",
    "moved",
    "restore",
    "tiny_parameter",
    "unpack",
    "unpacked_bytes",
]

# A plain attribute that holds a QuantState, so that it is moved, copied, pickled and audited like any companion.
UNPACKED = "_unpacked"


def tiny_parameter(modules: Any) -> tuple[Any, Any]:
    """A quantized nf4 parameter of 64 weights on the CPU, all zeros, and its quant state; for probes.

    Args:
        modules: ``bitsandbytes.nn.modules``, whose import need not be complete.
    """
    import torch

    from ..engine.probe import resolve

    state = resolve(modules, "QuantState")(
        absmax=torch.zeros(1),
        shape=torch.Size((64, 1)),
        code=torch.zeros(16),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
    )
    packed = torch.zeros(32, 1, dtype=torch.uint8)
    return modules.Params4bit(packed, quant_type="nf4", quant_state=state, bnb_quantized=True), state


def moved(parameter: Any, new_state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new parameter: ``parameter`` moved by ``.to(*args, **kwargs)``, with ``new_state``.

    ``parameter``, its bytes and its quant state are not changed.
    """
    result = sys.modules["torch"].Tensor._make_subclass(
        type(parameter), parameter.data.to(*args, **kwargs), parameter.requires_grad
    )
    vars(result).update(vars(parameter))
    vars(result)["quant_state"] = new_state
    return result


def belongs_to_layer(parameter: Any) -> bool:
    """Whether the layer that ``parameter`` refers to owns it, rather than the parameter from which it was made."""
    layer = vars(parameter).get("module")
    return layer is not None and any(own is parameter for own in layer._parameters.values())


def follow(parameter: Any, state: Any, new_state: Any) -> None:
    """If the layer of ``parameter`` refers to ``state``, make it refer to ``new_state``.

    Otherwise it would keep the memory on the old device in use.
    """
    layer = vars(parameter).get("module")
    if layer is not None and vars(layer).get("quant_state") is state:
        layer.quant_state = new_state


def unpack(parameter: Any) -> None:
    """Undo the repacking for the CPU kernel, bit by bit, if ``parameter`` is repacked.

    A parameter that only has the state of another is not changed: PEFT creates the parameter of a merged weight, which
    is not quantized yet, with the attributes of the old one.
    """
    state = vars(parameter).get("quant_state")
    if state is None or UNPACKED not in vars(state):
        return
    data = parameter.data
    if data.dtype is sys.modules["torch"].uint8 and data.shape == (state.shape[0], state.shape[1] // 2):
        _exchange(parameter, unpacked_bytes(data, state), state)


def _exchange(parameter: Any, data: Any, state: Any) -> None:
    """Set the bytes and restore the state in one call: Ctrl-C in between would leave a weight that computes noise.

    Torch's own setter, because that of the class is Python; and no ``with``, which Ctrl-C may leave without its end.
    """
    both = map(object.__setattr__, (parameter, state), ("data", "__dict__"), (data, _before(state)))
    sys.modules["torch"]._C._disabled_torch_function_impl(list, (), (both,))


def unpacked_bytes(packed: Any, state: Any) -> Any:
    """The bytes from before the repacking, as ``quantize_4bit`` returned them.

    Args:
        packed: uint8 [N, K / 2]. In blocks of 32 rows, each run of 32 bytes has one pair of columns: rows 0 to 15 in
            the low nibbles, rows 16 to 31 in the high ones.
        state: its ``QuantState``, which is not changed.

    Returns:
        A new tensor on the device of ``packed``, with the original shape and dtype (``quant_storage``).
    """
    torch = sys.modules["torch"]
    rows, half = state.shape[0], state.shape[1] // 2
    runs = packed.reshape(rows // 32, half, 32)
    nibbles = torch.cat([runs & 15, runs >> 4], dim=-1).view(rows // 32, half, 32, 2)
    first, second = nibbles.transpose(1, 2).unbind(-1)
    bytes_ = (first << 4 | second).reshape(state.original_qshape)
    storage = vars(state).get("original_storage_type")
    return bytes_ if storage is None else bytes_.view(storage)


def restore(state: Any) -> None:
    """Restore the original attributes of a repacked quant state, in place."""
    state.__dict__ = _before(state)


def _before(state: Any) -> dict[str, Any]:
    return dict(vars(vars(state)[UNPACKED]))
