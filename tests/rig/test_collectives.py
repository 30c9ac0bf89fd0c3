"""Collectives of gloo, of tensors on the devices; `tests/programs/distributed.py` runs them in two processes."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture
def group():
    """A process group of this process alone: gloo looks at the tensors all the same."""
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 names the tensor functions anew
        yield dist
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce",
        "gather", "scatter", "all_to_all_single", "asynchronous",
    ],
)  # fmt: skip
def test_a_collective(rig_devices, group, name):
    import torch

    here = rig_devices.devices[1]
    values, output = torch.arange(4.0, device=here), torch.zeros(4, device=here)
    held = rig_devices.allocated(here)
    calls = {
        "all_reduce": lambda: group.all_reduce(values),
        "broadcast": lambda: group.broadcast(values, 0),
        "all_gather": lambda: group.all_gather([output], values),
        "all_gather_into_tensor": lambda: group.all_gather_into_tensor(output, values),
        "reduce_scatter_tensor": lambda: group.reduce_scatter_tensor(output, values),
        "reduce": lambda: group.reduce(values, 0),
        "gather": lambda: group.gather(values, [output], 0),
        "scatter": lambda: group.scatter(output, [values], 0),
        "all_to_all_single": lambda: group.all_to_all_single(output, values),
        "asynchronous": lambda: group.all_gather([output], values, async_op=True).wait(),
    }
    calls[name]()
    result = values if name in ("all_reduce", "broadcast", "reduce") else output
    assert result.device == here
    assert result.tolist() == [0, 1, 2, 3]
    assert rig_devices.allocated(here) == held


def test_tensors_of_two_devices(rig_devices, group):
    import torch

    here, there = rig_devices.pair
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        group.all_gather([torch.zeros(4, device=there)], torch.ones(4, device=here))


def test_the_devices_are_gone_afterwards(group):
    import torch

    from tests import rig
    from tests.rig.accelerator import KIND
    from tests.rig.fixtures import require_rig

    require_rig()
    with rig.devices():
        values = torch.ones(4, device=KIND)
        group.all_reduce(values)
    with pytest.raises(RuntimeError):
        group.all_reduce(values)
    on_host = torch.ones(4)
    group.all_reduce(on_host)
    assert on_host.tolist() == [1, 1, 1, 1]
