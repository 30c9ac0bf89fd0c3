"""The quantized layers of a Flux transformer, as its LoRA loader sees them.

Upstream: ``FluxLoraLoaderMixin`` in diffusers/loaders/lora_pipeline.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    Lora = dict[str, Any]

__all__ = ["EXPAND", "Touched", "expanding", "touched"]

# It replaces the layers that are too small for a LoRA, and is called before the LoRA is loaded.
EXPAND = "_maybe_expand_transformer_param_shape_or_error_"


class Touched:
    """A quantized layer for which a LoRA has weights.

    Attributes:
        name: of the layer in the transformer.
        layer: the linear layer; ``in_features`` and ``out_features`` are its own, whatever shape the packed weight has.
        key: of ``down`` in the LoRA.
        down: the ``lora_A``, (rank, input features).
        too_small: whether the layer has fewer features than the LoRA.
    """

    __slots__ = ("down", "key", "layer", "name", "too_small")

    def __init__(self, name: str, layer: Any, key: str, down: Any, up: Any) -> None:
        self.name, self.layer, self.key, self.down = name, layer, key, down
        self.too_small: bool = down.shape[1] > layer.in_features or (
            up is not None and up.shape[0] > layer.out_features
        )


def touched(transformer: Any, lora: Lora, prefix: str) -> Iterator[Touched]:
    """Every quantized linear layer of a transformer for which the state dict of a LoRA has weights.

    The keys of the state dict may begin with the prefix ("transformer"); they do not name ``base_layer``.
    """
    import torch

    for name, layer in transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and type(layer.weight) is not torch.nn.Parameter:
            bare = name.removesuffix(".base_layer")
            for start in (f"{prefix}.{bare}", bare):
                key = f"{start}.lora_A.weight"
                if key in lora:
                    yield Touched(name, layer, key, lora[key], lora.get(f"{start}.lora_B.weight"))
                    break


def expanding(around: Callable[[Any, Lora, str], AbstractContextManager[Lora]]) -> Callable[[Any], Any]:
    """A wrapper of ``EXPAND``: upstream's method gets the LoRA that ``around(transformer, lora, prefix)`` yields."""

    def make(original: Any) -> Any:
        def expand(
            cls: Any,
            transformer: Any,
            lora_state_dict: Any = None,
            norm_state_dict: Any = None,
            prefix: Any = None,
            **kwargs: Any,
        ) -> Any:
            with around(transformer, lora_state_dict or {}, prefix or cls.transformer_name) as lora:
                return original(cls, transformer, lora, norm_state_dict, prefix, **kwargs)

        return expand

    return make
