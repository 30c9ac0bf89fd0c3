"""The packed weights of a GGUF checkpoint, before they are put into a model.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/quantizers/gguf/utils.py.
"""

from __future__ import annotations

from ..engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

__all__ = ["BEFORE", "packed_one", "prepare", "unpack"]

# The method of diffusers' quantizer that is called with the checkpoint before its tensors are put into the model.
BEFORE = "_process_model_before_weight_loading"


def unpack(state_dict: dict[str, Any], is_unpacked: Callable[[str], bool]) -> None:
    """Dequantize, in ``state_dict`` and on their device, the GGUF weights for whose name ``is_unpacked`` is true.

    The loader treats them like the weights that the file has in float32.
    """
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    for name, weight in list(state_dict.items()):
        if isinstance(weight, GGUFParameter) and is_unpacked(name):
            state_dict[name] = dequantize_gguf_tensor(weight)


def prepare(gguf_quantizer: ModuleType, model: Any, kept: list[str], state_dict: dict[str, Any]) -> None:
    """Call upstream's `BEFORE` for a small model; for probes.

    Args:
        gguf_quantizer: ``diffusers.quantizers.gguf.gguf_quantizer``.
        model: a model on meta.
        kept: names of its modules that stay in float32.
        state_dict: the checkpoint.
    """
    import torch

    class Quantizer(resolve(gguf_quantizer, "GGUFQuantizer")):  # type: ignore[misc]
        compute_dtype = torch.float32

        def __init__(self) -> None:
            self.modules_to_not_convert: list[str] = []

    before = resolve(Quantizer, BEFORE)
    before(Quantizer(), model, None, keep_in_fp32_modules=kept, state_dict=state_dict)


def packed_one(gguf_quantizer: ModuleType, kind: str, shape: tuple[int, ...]) -> Any:
    """A GGUFParameter of zeros; for probes.

    Args:
        gguf_quantizer: ``diffusers.quantizers.gguf.gguf_quantizer``.
        kind: the name of its quantization type, such as "Q4_0".
        shape: the shape of its bytes.
    """
    import torch

    quant_type = next(one for one in resolve(gguf_quantizer, "GGML_QUANT_SIZES") if one.name == kind)
    return resolve(gguf_quantizer, "GGUFParameter")(
        torch.zeros(shape, dtype=torch.uint8), quant_type=quant_type
    )
