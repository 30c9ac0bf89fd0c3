"""What the rig counts: bytes allocated, the peak, and bytes copied between devices."""

from __future__ import annotations

import copy
import gc

import pytest

from tests import rig

torch = pytest.importorskip("torch")

MEGA = 1 << 20


@pytest.fixture(autouse=True)
def _devices(rig_devices):
    return rig_devices


def test_allocations_are_counted_per_device():
    x = torch.zeros(MEGA, dtype=torch.uint8, device="cuda:1")
    y = x.view(torch.float16)[5:]
    assert (rig.allocated("cuda:0"), rig.allocated("cuda:1"), rig.allocated(1)) == (0, MEGA, MEGA)
    z = x + 1
    assert rig.allocated("cuda:1") == 2 * MEGA
    del x, z
    assert rig.allocated("cuda:1") == MEGA  # the view keeps it
    del y
    assert rig.allocated("cuda:1") == 0
    assert rig.peak("cuda:1") == 2 * MEGA
    rig.reset()
    assert rig.peak("cuda:1") == 0


def test_kernels_count_their_results_only():
    x = torch.rand(256, 1024, device="cuda:0")
    rig.reset()
    for operation in (
        lambda: x.sum(),
        lambda: x.add_(1),
        lambda: torch.nn.functional.gelu(x, approximate="none").sum(),
        lambda: x[torch.arange(10, device="cuda:0")],
        lambda: torch.index_select(x, 0, torch.arange(10, device="cuda:0")),
    ):
        operation()
    assert rig.peak("cuda:0") < 2 * x.nbytes + 100 * MEGA // 1024
    assert rig.traffic() == rig.Traffic(h2d=0, d2h=0, d2d=0)
    x[torch.arange(10)]  # CUDA sends an index on the CPU to the device, too
    assert rig.traffic() == rig.Traffic(h2d=80, d2h=0, d2d=0)


def test_resizing_is_counted():
    x = torch.zeros(10, device="cuda:1")
    x.resize_(1000)
    assert rig.allocated("cuda:1") == 4000
    x.untyped_storage().resize_(8)
    assert rig.allocated("cuda:1") == 8
    assert torch.UntypedStorage(100, device="cuda:1").device == torch.device("cuda:1")
    assert rig.allocated("cuda:1") == 8


def test_cycles_are_collected_first():
    class Node:
        pass

    node = Node()
    node.itself, node.data = node, torch.zeros(MEGA, device="cuda:1")
    gc.disable()
    try:
        del node
        assert torch.cuda.memory_allocated(1) == 4 * MEGA
        assert rig.allocated("cuda:1") == 0
    finally:
        gc.enable()


def test_traffic_in_each_direction():
    x = torch.ones(1000)
    y = x.to("cuda:1")
    assert rig.traffic() == rig.Traffic(h2d=4000, d2h=0, d2d=0)
    z = y.to("cuda:0")
    y.cpu()
    assert rig.traffic() == rig.Traffic(h2d=4000, d2h=4000, d2d=4000)
    assert rig.traffic("cuda:0") == rig.Traffic(h2d=0, d2h=0, d2d=4000)
    assert rig.traffic("cuda:1") == rig.Traffic(h2d=4000, d2h=4000, d2d=4000)
    rig.reset()
    assert z.sum().item() == 1000
    assert rig.traffic() == rig.Traffic(h2d=0, d2h=4, d2d=0)
    rig.reset()
    x[:10].copy_(y[:10])
    y[:5] = x[:5]
    assert rig.traffic() == rig.Traffic(h2d=20, d2h=40, d2d=0)


def test_copies_within_a_device_are_no_traffic():
    x = torch.ones(1000, device="cuda:1")
    rig.reset()
    keep = [x.clone(), copy.deepcopy(x), x.half(), x.view(10, 100).t().contiguous()]
    assert rig.traffic() == rig.Traffic(h2d=0, d2h=0, d2d=0)
    assert rig.allocated("cuda:1") == 4000 * 4 + 2000
    del keep


def test_copies_that_let_the_device_compute():
    pageable, pinned = torch.ones(1000), torch.ones(1000).pin_memory()
    side = torch.cuda.Stream("cuda:1")
    pinned.to("cuda:1", non_blocking=True)  # on the default stream
    with torch.cuda.stream(side):
        pageable.to("cuda:1", non_blocking=True)
        pinned.to("cuda:1")
        torch.ones(1000, device="cuda:1").cpu()
        assert rig.overlapping() == 0
        pinned[:10].to("cuda:1", non_blocking=True)
    assert (rig.overlapping(), rig.overlapping("cuda:1"), rig.overlapping("cuda:0")) == (40, 40, 0)
    rig.reset()
    assert rig.overlapping() == 0


def test_a_file_loaded_to_a_device_travels_once(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.ones(1000)}, tmp_path / "x.safetensors")
    torch.save(torch.ones(1000), tmp_path / "x.pt")
    rig.reset()
    first = load_file(tmp_path / "x.safetensors", device="cuda:1")["a"]
    assert (rig.traffic().h2d, rig.allocated("cuda:1"), rig.peak("cuda:1")) == (4000, 4000, 4000)
    second = torch.load(tmp_path / "x.pt", map_location="cuda:0")
    assert (rig.traffic().h2d, rig.allocated("cuda:0"), rig.peak("cuda:0")) == (8000, 4000, 4000)
    assert torch.equal(first.cpu(), second.cpu())


def test_torch_gives_the_same_figures():
    x = torch.zeros(MEGA, device="cuda:1")
    free, total = torch.cuda.mem_get_info(1)
    assert total - free == torch.cuda.memory_allocated("cuda:1") == rig.allocated("cuda:1") == 4 * MEGA
    assert torch.cuda.get_device_properties(1).total_memory == total
    del x
    assert torch.cuda.memory_allocated(1) == torch.cuda.memory_reserved(1) == 0
    assert (
        torch.cuda.max_memory_allocated(1)
        == torch.cuda.memory_stats(1)["allocated_bytes.all.peak"]
        == 4 * MEGA
    )
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0
    with pytest.raises(ValueError, match="CUDA devices only"):
        rig.allocated("cpu")
