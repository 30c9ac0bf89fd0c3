"""torch's MultiheadAttention with a quantized output layer.

It never calls ``out_proj``, which quantization replaces: it passes the weight, even a packed one, to torch's function.
For one call, models that contain one get a replacement that computes the same but calls the layer.

Upstream: torch/nn/modules/activation.py (``MultiheadAttention``).
"""

from __future__ import annotations

import sys
from functools import partial

from ..engine.probe import resolve
from ..offloading.called import as_called
from .plain_weights import InPlaceOf, LayerCalled, is_plain, packed_stand_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["PATTERN", "calling_output_layer", "calls_output_layer", "head_calls_output_layer"]

# torch's error for a packed weight.
PATTERN = r"(self|mat1|m1) and (mat2|m2)"


def calls_output_layer(attention: Any, run: Callable[[], Any]) -> bool:
    """A probe: whether ``run()`` calls the output layer of ``attention`` if its weight is packed.

    ``run`` computes with an empty batch: the first product of numbers on the CPU would make MKL read the program's
    settings for good, and on meta torch computes each shape in Python.
    """
    attention.out_proj = packed_stand_in(attention.embed_dim)
    try:
        run()
    except LayerCalled:
        return True
    except (AssertionError, RuntimeError):
        return False
    return True


def head_calls_output_layer(modeling: Any, prefix: str) -> bool:
    """The same probe for the pooling head of a transformers vision model.

    Args:
        modeling: the module that defines it.
        prefix: the prefix of its class and of its configuration's class: "Siglip", "Siglip2".
    """
    import torch

    config = resolve(modeling, f"{prefix}VisionConfig")(
        hidden_size=4, num_attention_heads=1, intermediate_size=1
    )
    head = resolve(modeling, f"{prefix}MultiheadAttentionPoolingHead")(config)
    return calls_output_layer(head.attention, lambda: head(torch.empty(0, 1, 4)))


def calling_output_layer(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the wrapper of a module's method that makes the attention ``name`` of the module call its output layer."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(_with_called_output_layer(self, name), *args, **kwargs)

        return method

    return make


def _with_called_output_layer(module: Any, name: str) -> Any:
    """``module``, or a replacement to pass as ``self`` to a method if the attention ``name`` has a quantized output
    layer."""
    attention = getattr(module, name)
    return module if is_plain(attention.out_proj) else InPlaceOf(module, {name: _Attention(attention)})


class _Attention:
    """A replacement for a ``torch.nn.MultiheadAttention``, called in the same way."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def __call__(
        self, query: Any, key: Any, value: Any, *, attn_mask: Any = None, **_: Any
    ) -> tuple[Any, None]:
        """The output, of the shape of ``query``, and None in place of the attention weights.

        ``attn_mask`` is added to the scores: [queries, keys] or [batch * heads, queries, keys].
        """
        attention = self._attention
        # Under offload, hooks onload the attention's own weights.
        return as_called(attention, partial(_attended, attention), query, key, value, attn_mask), None


def _attended(attention: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
    functional = sys.modules["torch"].nn.functional

    def heads(tokens: Any, weight: Any, bias: Any) -> Any:
        projected = functional.linear(tokens, weight, bias).unflatten(-1, (attention.num_heads, -1))
        return projected.transpose(1, 2) if attention.batch_first else projected.permute(1, 2, 0, 3)

    weights, biases = attention.in_proj_weight.chunk(3), (None,) * 3
    if attention.in_proj_bias is not None:
        biases = attention.in_proj_bias.chunk(3)
    projected = [heads(*one) for one in zip((query, key, value), weights, biases, strict=True)]
    if mask is not None:
        mask = mask.to(query)
        mask = mask.unflatten(0, (-1, attention.num_heads)) if mask.dim() == 3 else mask
    attended = functional.scaled_dot_product_attention(*projected, attn_mask=mask)
    attended = attended.transpose(1, 2) if attention.batch_first else attended.permute(2, 0, 1, 3)
    return attention.out_proj(attended.flatten(2))
