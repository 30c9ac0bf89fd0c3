"""Merging an adapter of peft into a weight of torchao, and taking it out again.

peft's layer dequantizes the weight, adds or subtracts the product of one LoRA, and quantizes the sum anew. Each time
the weight is rounded once more: `bits_of` and `put` are for `before_merge`. And it knows no variants of LoRA, a second
adapter finds a variable that was deleted, and an adapter that is not on this layer is asked for its product:
`as_plain_layers_do` lets it do what its base class does, peft's layer of plain weights.

Neither torch nor another library is imported here at module level.

Upstream: ``TorchaoLoraLinear`` of peft/tuners/lora/torchao.py, ``Linear`` of peft/tuners/lora/layer.py;
``TorchAOBaseTensor`` of torchao/utils.py.
"""

from __future__ import annotations

from ..engine.probe import function_of, written_in
from ..weights.wrappers import put_together, taken_apart
from .before_merge import undone_on_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["as_plain_layers_do", "bits_of", "knows_no_variants", "put"]


def bits_of(adapter: Any, base: Any) -> Any:
    """The bits of ``base`` for `before_merge`: how its weight is made, and the inner tensors.

    Also of a plain weight: a config that names layers may match none when peft quantizes a single one anew.
    """
    return taken_apart(base.weight), None


def put(base: Any, parts: Any) -> None:
    """Give ``base`` the weight that is made of ``parts``."""
    import torch

    made, tensors = parts
    requires_grad = base.weight.requires_grad
    # A weight that is made in inference mode can take no part in training later.
    with torch.inference_mode(False):
        weight = put_together(made, tensors, requires_grad)
        if made is None:
            weight = torch.nn.Parameter(weight, requires_grad)
        # That of a layer which accelerate offloads is none for torch.
        weight._is_param = True
    base.weight = weight


def knows_no_variants(cls: Any) -> bool:
    """Whether ``merge`` of a layer class of peft treats a DoRA as a LoRA, with nothing of ours around it."""
    merge = vars(cls)["merge"]
    names = {"use_dora", "lora_variant"} & set(function_of(merge).__code__.co_names)
    return not names and not written_in(merge, __name__)


def as_plain_layers_do(cls: Any, verb: str) -> Callable[[Callable[..., Any]], Any]:
    """How to wrap ``merge`` or ``unmerge`` of ``cls``: what its own code cannot do is done as for plain weights.

    Args:
        cls: peft's class for torchao.
        verb: "merge" or "unmerge".
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def merge_or_unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _needs_more(self, verb, *args, **kwargs):
                return original(self, *args, **kwargs)
            base = self.get_base_layer()
            packed = base.weight
            try:
                plain = packed.dequantize()
            except NotImplementedError:
                plain = None
            if plain is None or self.get_apply_tensor_subclass is None:
                return original(self, *args, **kwargs)  # which says so, before it changes anything
            self._check_dtype_supported()
            import torch
            from torchao import quantize_

            merged = list(self.merged_adapters)
            with undone_on_failure(self, base):
                base.weight = torch.nn.Parameter(plain, requires_grad=False)
                result = getattr(super(cls, self), verb)(*args, **kwargs)
                if self.merged_adapters == merged:
                    base.weight = packed
                else:
                    quantize_(base, self.get_apply_tensor_subclass())
            return result

        return merge_or_unmerge

    return wrap


def _needs_more(adapter: Any, verb: str, safe_merge: bool = False, adapter_names: Any = None) -> bool:
    """Whether upstream's own code cannot merge or take out these adapters: a variant of LoRA, several, or none."""
    if verb == "unmerge":
        names = adapter.merged_adapters
    else:
        names = adapter.active_adapters if adapter_names is None else adapter_names
        if isinstance(names, str):  # upstream refuses it
            return False
        names = [name for name in names if name not in adapter.merged_adapters]
        if len(names) > 1 or any(name not in adapter.lora_A for name in names):
            return True
    variants, doras = getattr(adapter, "lora_variant", {}), getattr(adapter, "use_dora", {})
    return any(name in variants or doras.get(name) for name in names)
