"""diffusers-group-offload-record-stream: record_stream names the stream that copies, not the one that computes."""

from __future__ import annotations

import pytest

from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, LEAF, LOW, RECORD, offload
from tests.fixes.test_diffusers_group_offload_prefetch import assert_output, build, run

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-record-stream"
# The late rig's word for memory that is freed while it may still be read.
SHOWS = "reuse|early free"


@pytest.mark.late(needs="diffusers>=0.33", shows_bare=True)
# Before diffusers 0.35, nobody waits for the last layer.
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.35")
@pytest.mark.parametrize(
    "mode", [LEAF | RECORD, BLOCK | RECORD, BLOCK | LOW | RECORD], ids=["leaf", "block", "low"]
)
def test_memory_is_not_used_again_while_it_is_read(gpu, mode):
    device = gpu.devices[0]
    model = build("plain", device)
    expected = run(model, device)
    offload(model, device, mode)
    for _ in range(3):
        assert_output(model, device, expected)
