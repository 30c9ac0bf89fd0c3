"""fully_shard of an 8-bit model raises an error, and changes nothing."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import torch.distributed as dist

    from ..case import CannotReproduce
    from ..models import eight_bit

    eight_bit.device()
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise CannotReproduce("needs torch >= 2.8, the first that shards on the CPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    cpu = torch.device("cpu")
    model = eight_bit.layers(cpu)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        eight_bit.run(model, cpu)
    except ValueError as refusal:
        assert "fully_shard cannot shard the 8-bit weights" in str(refusal), str(refusal)
    finally:
        dist.destroy_process_group()
    assert all(type(layer.weight).__name__ == "Int8Params" for layer in model), (
        "the weights are not 8-bit any more"
    )
    return "raises an error that names `ignored_params`, before anything is changed"
