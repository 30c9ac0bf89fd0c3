"""Models of 4-bit layers are offloaded with and without a stream, and one of 8-bit layers with a stream."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import group_offload

    group_offload.check(group_offload.layers(4), group_offload.run)
    group_offload.check(group_offload.layers(4), group_offload.run, use_stream=True)
    return group_offload.check(group_offload.layers(8), group_offload.run, use_stream=True)
