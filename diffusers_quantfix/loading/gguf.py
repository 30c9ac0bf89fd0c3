"""The packed weights of a GGUF checkpoint, before they are loaded into a model.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/quantizers/gguf/utils.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["unpack"]


def unpack(state_dict: dict[str, Any], is_unpacked: Callable[[str], bool]) -> None:
    """Dequantize, in ``state_dict`` and on their device, the GGUF weights for whose name ``is_unpacked`` is true.

    The loader treats them like the weights that the file has in float32.
    """
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    for name, weight in list(state_dict.items()):
        if isinstance(weight, GGUFParameter) and is_unpacked(name):
            state_dict[name] = dequantize_gguf_tensor(weight)
