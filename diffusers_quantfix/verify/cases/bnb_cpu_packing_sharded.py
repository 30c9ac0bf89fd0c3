"""A 4-bit layer sharded by FSDP runs twice on the CPU; both outputs must equal the unsharded layer's."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import torch.distributed as dist
    from bitsandbytes import functional

    from ..case import CannotReproduce
    from ..models import four_bit

    four_bit.device()
    if not getattr(functional, "has_avx512bf16", bool)():
        raise CannotReproduce("needs a CPU with AVX512-BF16, on which bitsandbytes repacks the weights")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise CannotReproduce("needs torch >= 2.8, the first that shards on the CPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    cpu = torch.device("cpu")
    layer, inputs = four_bit.linear(torch.nn.Linear(128, 64), cpu), torch.randn(1, 128)
    with torch.no_grad():
        # In training mode bitsandbytes does not repack.
        expected = layer.train()(inputs)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(layer.eval(), mesh=mesh, reshard_after_forward=True)
        with torch.no_grad():
            outputs = [layer(inputs) for _ in range(2)]
        errors = [((output - expected).norm() / expected.norm()).item() for output in outputs]
    finally:
        dist.destroy_process_group()
    # The CPU kernel computes in bfloat16.
    assert max(errors) < 0.02, f"the relative error of the output: {errors[0]:.2g}, then {errors[1]:.2g}"
    return "a 4-bit layer that FSDP shards gives the same output again"
