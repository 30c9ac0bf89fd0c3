"""torch's ``weight_norm``, which computes the weight of a layer in a hook before its ``forward``.

Hooks that onload the parameters run inside ``forward``: the weight would be computed from parameters that are still
offloaded. And it is no parameter, so that nothing offloads it. An offload hook calls the functions of this module.

Upstream: torch/nn/utils/weight_norm.py (``WeightNorm``). ``torch.nn.utils.parametrizations.weight_norm`` computes it
when ``forward`` reads it, and needs none of this.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "OffloadedModel",
    "compute_weight",
    "drop_weight",
    "normalized_stand_in",
    "norms",
    "offload_weights",
    "take_norms",
]


def norms(module: Any) -> dict[int, Any]:
    """A module's ``weight_norm`` hooks, by the key of their handle."""
    kind = sys.modules["torch.nn.utils.weight_norm"].WeightNorm  # the module: torch.nn.utils has the function
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)}


def take_norms(module: Any) -> dict[int, Any]:
    """Take a module's ``weight_norm`` hooks off; the result put into ``module._forward_pre_hooks`` undoes it."""
    taken = norms(module)
    for key in taken:
        del module._forward_pre_hooks[key]
    return taken


def compute_weight(module: Any, taken: dict[int, Any]) -> None:
    """Compute the weight of ``module``, whose parameters are onloaded."""
    for norm in taken.values():
        norm(module, ())


def drop_weight(module: Any, taken: dict[int, Any]) -> None:
    """Free the weight of ``module`` after its ``forward``; it keeps its shape and dtype."""
    for norm in taken.values():
        setattr(module, norm.name, getattr(module, norm.name).to("meta"))


def offload_weights(model: Any) -> None:
    """Move the computed weights of ``model``, whose parameters were moved to the CPU, after them."""
    for layer in model.modules():
        for norm in norms(layer).values():
            weight = getattr(layer, norm.name)
            if not weight.is_cpu and not weight.is_meta:
                setattr(layer, norm.name, weight.detach().to("cpu"))


class ComputedWeight:
    """A computed weight on some device, for a probe: was it moved?"""

    is_cpu = is_meta = is_taken_along = False

    def detach(self) -> ComputedWeight:
        return self

    def to(self, device: Any) -> ComputedWeight:
        self.is_taken_along = True
        return self


class OffloadedModel:
    """A model with one layer that has a `ComputedWeight`, for a probe; its parameters stay where they are."""

    def __init__(self) -> None:
        import torch

        self.weight = ComputedWeight()
        self.layer = normalized_stand_in(torch.nn.Module(), "meta")
        self.layer.weight = self.weight

    def modules(self) -> tuple[Any, ...]:
        return (self.layer,)

    def to(self, device: Any) -> OffloadedModel:
        return self


def normalized_stand_in(layer: Any, device: str) -> Any:
    """Give ``layer``, which has no parameters, what ``torch.nn.utils.weight_norm`` would, on ``device``.

    For probes: that one computes, and warns that it is deprecated.
    """
    import torch

    layer.weight_g, layer.weight_v = (torch.nn.Parameter(torch.empty(1, device=device)) for _ in range(2))
    layer.weight = torch.empty(1, device=device)
    norm = sys.modules["torch.nn.utils.weight_norm"].WeightNorm("weight", 0)
    layer.register_forward_pre_hook(norm)
    return layer
