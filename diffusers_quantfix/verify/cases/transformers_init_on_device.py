"""Two threads make models without weights at once; layers are made meanwhile and afterwards."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import transformers.integrations.accelerate as integration

    from ..models.threads import layers_keep_weights

    # Since 5.0 it is torch that makes models without weights, for one thread.
    return layers_keep_weights(getattr(integration, "init_empty_weights", lambda: torch.device("meta")))
