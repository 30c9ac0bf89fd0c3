"""Merging a peft adapter into a torchao weight, and unmerging it.

peft's layer dequantizes the weight, adds or subtracts the delta of one LoRA, and quantizes the sum again. Each time the
weight is rounded once more: `bits_of` and `put` are for `before_merge`. It also ignores variants of LoRA, fails on a
second adapter with a deleted variable, and asks an adapter that this layer does not have for its delta:
`as_plain_layers_do` uses the base class instead, peft's layer for plain weights.

Neither torch nor another library is imported here at module level.

Upstream: ``TorchaoLoraLinear`` of peft/tuners/lora/torchao.py, ``Linear`` of peft/tuners/lora/layer.py;
``TorchAOBaseTensor`` of torchao/utils.py.
"""

from __future__ import annotations

from ..engine.probe import function_of
from ..weights.wrappers import put_together, taken_apart
from .before_merge import undone_on_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["as_plain_layers_do", "bits_of", "knows_no_variants", "put"]


def bits_of(adapter: Any, base: Any) -> Any:
    """The bits of ``base`` for `before_merge`: its weight taken apart by `taken_apart`, and no bias.

    A plain weight has bits too: a config that names layers may match none when peft quantizes a single layer again.
    """
    return taken_apart(base.weight), None


def put(base: Any, parts: Any) -> None:
    """Give ``base`` the weight made of ``parts``."""
    import torch

    made, tensors = parts
    requires_grad = base.weight.requires_grad
    # A weight created in inference mode could not be used in training later.
    with torch.inference_mode(False):
        weight = put_together(made, tensors, requires_grad)
        if made is None:
            weight = torch.nn.Parameter(weight, requires_grad)
        # torch does not count the weight of a layer that accelerate offloads as a parameter.
        weight._is_param = True
    base.weight = weight


def knows_no_variants(cls: Any) -> bool:
    """Whether ``merge`` of a peft layer class treats a DoRA as a LoRA."""
    merge = vars(cls)["merge"]
    names = {"use_dora", "lora_variant"} & set(function_of(merge).__code__.co_names)
    return not names


def as_plain_layers_do(cls: Any, verb: str) -> Callable[[Callable[..., Any]], Any]:
    """Return the wrapper of ``merge`` or ``unmerge`` of ``cls``: cases it cannot handle are done as for plain weights.

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
                return original(self, *args, **kwargs)  # which raises before it changes anything
            self._check_dtype_supported()
            import torch
            from torchao import quantize_

            merged = list(self.merged_adapters)

            def merge_plain() -> Any:
                base.weight = torch.nn.Parameter(plain, requires_grad=False)
                result = getattr(super(cls, self), verb)(*args, **kwargs)
                if self.merged_adapters == merged:
                    base.weight = packed
                else:
                    quantize_(base, self.get_apply_tensor_subclass())
                return result

            return undone_on_failure(self, base, merge_plain)

        return merge_or_unmerge

    return wrap


def _needs_more(adapter: Any, verb: str, safe_merge: bool = False, adapter_names: Any = None) -> bool:
    """Whether upstream cannot merge or unmerge these adapters: a variant of LoRA, several, or one not in this layer."""
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
