"""Two threads make models without weights at once; layers are made meanwhile and afterwards."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft.utils.integrations import init_empty_weights

    from ..models.threads import layers_keep_weights

    return layers_keep_weights(init_empty_weights)
