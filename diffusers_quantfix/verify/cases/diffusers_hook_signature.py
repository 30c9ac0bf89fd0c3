"""The ``forward`` of a group-offloaded Flux transformer names what it takes, as modular pipelines ask it."""

from __future__ import annotations


def case(work: str) -> str | None:
    import inspect

    from ..models import flux, group_offload

    model = flux.transformer()
    wanted = list(inspect.signature(model.forward).parameters)
    group_offload.by_blocks(model)
    found = list(inspect.signature(model.forward).parameters)
    assert found == wanted, f"forward takes {', '.join(found)} instead of {len(wanted)} named inputs"
    return f"forward names its {len(wanted)} inputs"
