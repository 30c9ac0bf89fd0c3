"""The fully_shard of torch before 2.6 on an 8-bit model raises an error, and changes nothing."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import torch.distributed as dist
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    from ..models import eight_bit

    eight_bit.device()
    model = eight_bit.layers(torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    except ValueError as refusal:
        assert "fully_shard cannot shard the 8-bit weights" in str(refusal), str(refusal)
    finally:
        dist.destroy_process_group()
    assert all(type(layer.weight).__name__ == "Int8Params" for layer in model), (
        "the weights are not 8-bit any more"
    )
    return "raises an error, before anything is changed"
