"""Whether a layer of bitsandbytes keeps its bias in the dtype of its last input.

Upstream: bitsandbytes/nn/modules.py (``Linear8bitLt.forward``, ``Linear4bit.forward``).
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["STORED", "stores_bias"]

# The statement of upstream.
STORED = "self.bias.data = self.bias.data.to(x.dtype)"


def stores_bias(layer_class: Any, inputs: Any, compute_dtype: Any = None) -> bool:
    """Run a layer with only a bias, in float32; the multiplication after it fails.

    Args:
        layer_class: ``Linear8bitLt`` or ``Linear4bit``.
        inputs: what the layer is called with; of what is no tensor it needs the dtype.
        compute_dtype: of a ``Linear4bit``. The bias is stored in this dtype, or in that of the inputs.
    """
    import torch

    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(1, 1), requires_grad=False)
    layer.weight.quant_state, layer.weight.CB = object(), None
    layer.bias = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    layer.state = SimpleNamespace()
    layer.compute_dtype, layer.compute_type_is_set = compute_dtype, True
    layer.support_avx512bf16_for_cpu, layer.ipex_linear_is_set = False, True
    with contextlib.suppress(AttributeError, AssertionError, TypeError, RuntimeError):
        layer_class.forward(layer, inputs)
    return bool(layer.bias.dtype != torch.float32)
