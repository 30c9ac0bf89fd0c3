"""LoRA training of quantized language models in two processes, with DistributedDataParallel and with `fully_shard`.

Each is compared with one process that has the whole batch, and resumed from a checkpoint.  Arguments: the folder of the
language model, "ddp", "fully_shard" or "FullyShardedDataParallel", and the kinds of quantization.
"""

import gc
import hashlib
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig

STEPS, SAVED_AFTER = 4, 2
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def configuration(kind):
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "quanto-int8":
        return QuantoConfig(weights="int8")
    storage = kind.split("-")[-1] if "float" in kind else "uint8"
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant="double" in kind,
        bnb_4bit_quant_storage=getattr(torch, storage),
    )


def load(folder, kind):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=configuration(kind), device_map={"": "cpu"}, dtype=torch.float32
    )
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()


def distribute(model, way):
    """What is called instead of the model; `fully_shard` changes the model itself."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "FullyShardedDataParallel":
        return FullyShardedDataParallel(model, use_orig_params=True)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_checkpoint(model, optimizer, way, checkpoint):
    if way == "fully_shard":
        of_model, of_optimizer = get_state_dict(model, optimizer, options=OPTIONS)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=checkpoint)
        return
    if dist.get_rank() == 0:
        torch.save((get_peft_model_state_dict(model), optimizer.state_dict()), checkpoint)
    dist.barrier()


def load_checkpoint(model, optimizer, way, checkpoint):
    if way == "fully_shard":
        of_model, of_optimizer = get_state_dict(model, optimizer, options=OPTIONS)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=checkpoint)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=of_model,
            optim_state_dict=of_optimizer,
            options=OPTIONS,
        )
        return
    adapter, of_optimizer = torch.load(checkpoint)
    set_peft_model_state_dict(model, adapter)
    optimizer.load_state_dict(of_optimizer)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(folder, kind, way, checkpoint, resume=False):
    """The loss of each step over the whole batch, the norm of its gradients, and a digest of the adapter at the end."""
    model = load(folder, kind)
    parallel = distribute(model, way) if way else model
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if resume:
        load_checkpoint(model, optimizer, way, checkpoint)
    losses, norms = [], []
    for step in range(SAVED_AFTER if resume else 0, STEPS):
        batch = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        if way:
            batch = batch.chunk(2)[dist.get_rank()]
        loss = parallel(input_ids=batch, labels=batch).loss
        loss.backward()
        loss = loss.detach()
        if way:
            dist.all_reduce(loss)
            loss /= 2
        losses.append(loss.item())
        norms.append(sum(full(one.grad).pow(2).sum() for one in trained).sqrt().item())
        optimizer.step()
        optimizer.zero_grad()
        if way and not resume and step + 1 == SAVED_AFTER:
            save_checkpoint(model, optimizer, way, checkpoint)
    adapter = b"".join(full(one.detach()).numpy().tobytes() for one in trained)
    return losses, norms, hashlib.sha256(adapter).hexdigest()


def compare(folder, kind, way, scratch):
    alone, checkpoint = train(folder, kind, None, None), os.path.join(scratch, kind)
    together = train(folder, kind, way, checkpoint)
    gc.collect()
    resumed = train(folder, kind, way, checkpoint, resume=True)
    gc.collect()
    digests = [None, None]
    dist.all_gather_object(digests, together[2])
    pairs = [*zip(alone[0], together[0], strict=True), *zip(alone[1], together[1], strict=True)]
    return {
        "equal in both processes": len(set(digests)) == 1,
        "off": max(abs(one - other) / one for one, other in pairs),
        "resumed": resumed[0] == together[0][SAVED_AFTER:] and resumed[2] == together[2],
        "adapter": together[2],
    }


def main(rank, folder, way, kinds, scratch):
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=2)
    told = {kind: compare(folder, kind, way, scratch) for kind in kinds}
    if rank == 0:
        print("RESULT", json.dumps(told), flush=True)
    # DistributedDataParallel must be gone before the group is.  Otherwise its reducer is the last that holds the group:
    # it waits for a thread of gloo while it holds the interpreter's lock, which that thread wants.  One run in twenty
    # hung so, without this package; a barrier alone did not help.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, way, *kinds = sys.argv[1:]
    # Forked before anything runs, so that the imports are paid once.
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(main, args=(folder, way, kinds, scratch), nprocs=2, start_method="fork")
