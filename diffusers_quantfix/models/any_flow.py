"""AnyFlow's embedding of time and step size, which two diffusers modules define in the same way.

Upstream: diffusers/models/transformers/transformer_anyflow.py and transformer_anyflow_far.py.
"""

from __future__ import annotations

import sys

from .plain_weights import LayerCalled, packed_stand_in, with_floating_weights

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["destroys_step_size", "keeping_step_size"]


def destroys_step_size(embedding_class: Any) -> bool:
    """Whether ``embedding_class.forward_timestep`` casts the input of an embedder with a packed weight to integers."""
    torch = sys.modules["torch"]

    embedding = embedding_class.__new__(embedding_class)
    torch.nn.Module.__init__(embedding)
    embedding.timesteps_proj = torch.nn.Identity()
    embedding.time_embedder = torch.nn.PReLU()  # any layer with a weight
    embedding.delta_embedder = packed_stand_in(1)
    try:
        embedding.forward_timestep(torch.empty(1, 1), torch.empty(1, 1), torch.empty(1), 1)
    except LayerCalled as called:
        return not called.dtype.is_floating_point
    return False


def keeping_step_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward_timestep`` to support embedders with packed weights."""

    def forward_timestep(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = with_floating_weights(self, "time_embedder", "delta_embedder")
        return original(seen, *args, **kwargs)

    return forward_timestep
