"""torch's MultiheadAttention with a quantized output layer.

Quantization replaces its ``out_proj``, which it never calls: it gives the weight, a packed one too, to torch's
function. Models that have one get an object in its place, for one call, that computes the same by calling the layer.

Upstream: torch/nn/modules/activation.py (``MultiheadAttention``).
"""

from __future__ import annotations

import sys

from ..engine.probe import resolve
from ..surroundings import on_meta
from .plain_weights import InPlaceOf, LayerCalled, is_plain, packed_stand_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["PATTERN", "calling_output_layer", "calls_output_layer", "head_calls_output_layer"]

# What torch says of a packed weight.
PATTERN = r"(self|mat1|m1) and (mat2|m2)"


def calls_output_layer(attention: Any, run: Callable[[], Any]) -> bool:
    """A probe on the meta device: does ``run()`` call the output layer of ``attention`` when its weight is packed?"""
    attention.out_proj = packed_stand_in(attention.embed_dim)
    try:
        run()
    except LayerCalled:
        return True
    except (AssertionError, RuntimeError):
        return False
    return True


def head_calls_output_layer(modeling: Any, prefix: str) -> bool:
    """The same probe for the pooling head of a vision model of transformers.

    Args:
        modeling: the module that defines it.
        prefix: of its class and of that of the configuration: "Siglip", "Siglip2".
    """
    import torch

    with on_meta():
        config = resolve(modeling, f"{prefix}VisionConfig")(
            hidden_size=4, num_attention_heads=1, intermediate_size=1
        )
        head = resolve(modeling, f"{prefix}MultiheadAttentionPoolingHead")(config)
        return calls_output_layer(head.attention, lambda: head(torch.empty(1, 1, 4)))


def calling_output_layer(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a draft: a method of a module that calls the output layer of the module's attention ``name``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(_with_called_output_layer(self, name), *args, **kwargs)

        return method

    return make


def _with_called_output_layer(module: Any, name: str) -> Any:
    """``module``, or what to pass as ``self`` to one of its methods where the output layer of the attention ``name`` is
    quantized."""
    attention = getattr(module, name)
    return module if is_plain(attention.out_proj) else InPlaceOf(module, {name: _Attention(attention)})


class _Attention:
    """To be called like the ``torch.nn.MultiheadAttention`` that it stands for."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def __call__(
        self, query: Any, key: Any, value: Any, *, attn_mask: Any = None, **_: Any
    ) -> tuple[Any, None]:
        """The attention [like ``query``], without the weights of the attention.

        ``attn_mask`` is added to the products: [queries, keys] or [batch * heads, queries, keys].
        """
        attention = self._attention
        # accelerate's, which brings the weights that are the attention's own under sequential offload
        hook = getattr(attention, "_hf_hook", None)
        if hook is None:
            return _attended(attention, query, key, value, attn_mask), None
        (query, key, value), _kwargs = hook.pre_forward(attention, query, key, value)
        return hook.post_forward(attention, _attended(attention, query, key, value, attn_mask)), None


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
