"""The state of an optimizer under FSDP 1 is saved in shards and loaded into a new optimizer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import contextlib
    import os
    import tempfile

    import torch
    import torch.distributed as dist
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import load_fsdp_optimizer, save_fsdp_optimizer
    from torch.distributed.fsdp import FullyShardedDataParallel

    from ..case import NeedsDevice
    from ..models import four_bit
    from ..models.fully_sharded import take_apart

    where = four_bit.device()
    if where.type != "cuda":
        raise NeedsDevice("needs a CUDA device: FSDP 1 takes no models on the CPU")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(AcceleratorState._reset_state, True)  # shared by every Accelerator of this process
        accelerator = Accelerator()
        plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
        model = FullyShardedDataParallel(
            torch.nn.Linear(8, 8).to(where), use_orig_params=True, device_id=where.index or 0
        )
        stack.callback(take_apart, model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8, device=where)).sum().backward()
        optimizer.step()
        expected = [optimizer.state[one]["exp_avg"].cpu() for one in model.parameters()]
        # accelerate 1.13 takes a path that contains "optimizer", as `work` does, for the folder of the shards itself.
        folder = tempfile.mkdtemp(dir=os.path.dirname(work))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        other = torch.optim.AdamW(model.parameters())
        load_fsdp_optimizer(plugin, accelerator, other, model, folder)
        found = [other.state[one].get("exp_avg") for one in model.parameters()]
        model.zero_grad()
    for one, two in zip(expected, found, strict=True):
        assert two is not None, "the new optimizer has no momenta"
        assert torch.equal(one, two.cpu()), "the momenta are not those that were saved"
    return "the momenta are those that were saved"
