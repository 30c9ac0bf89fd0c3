"""A Flux transformer from a 4-bit checkpoint is sharded by fully_shard and runs twice."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import torch.distributed as dist
    from diffusers import FluxTransformer2DModel

    from ..case import CannotReproduce, NeedsDevice
    from ..models import four_bit

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        raise CannotReproduce("needs torch >= 2.12, the first that shards bytes")
    where = four_bit.device()
    if where.type != "cuda":
        raise NeedsDevice("needs a CUDA device: diffusers loads 4-bit models on a GPU only")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    cpu = torch.device("cpu")
    four_bit.flux(f"{work}/plain", where).save_pretrained(f"{work}/packed")
    model = FluxTransformer2DModel.from_pretrained(f"{work}/packed", torch_dtype=torch.float32)
    model.to(cpu).train()  # in training mode a CPU with AVX512-BF16 does not repack
    try:
        expected = four_bit.run_flux(model, cpu)
    except (RuntimeError, ValueError) as error:  # before bitsandbytes 0.46
        raise CannotReproduce(f"bitsandbytes does not quantize on this CPU: {error!r}") from None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        errors = [(four_bit.run_flux(model, cpu) - expected).abs().max().item() for _ in range(2)]
    finally:
        dist.destroy_process_group()
    assert errors == [0, 0], f"errors in two runs: {errors}"
    return "exact in two runs of the sharded model"
