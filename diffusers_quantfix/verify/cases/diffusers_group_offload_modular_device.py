"""A modular pipeline whose model is group-offloaded computes with its output."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import group_pipelines

    device = cuda()
    output = group_pipelines.step(group_pipelines.modular(device))
    assert output.device == device, f"the output is on {output.device}"
    return f"the pipeline computes on {device}"
