"""LoRA training of quantized models in two processes: DistributedDataParallel, `fully_shard`, FullyShardedDataParallel.

Each is compared with one process that has the whole batch, and resumed from a checkpoint.  Arguments: the folder of a
language model or of a Flux transformer, the way ("ddp", "fully_shard" or "FullyShardedDataParallel", with " on devices"
after it for two GPUs, one for each process), and the kinds of quantization.  "loaded-" before one of them: the model
is not quantized while it is loaded, but comes from a checkpoint of such a model.
"""

import gc
import hashlib
import json
import os
import pathlib
import sys
import tempfile
from contextlib import nullcontext

import diffusers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

STEPS, SAVED_AFTER = 4, 2
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class LanguageModel:
    def __init__(self, folder):
        self.folder = folder

    def load(self, folder, where, **options):
        return AutoModelForCausalLM.from_pretrained(folder, device_map={"": where}, **options)

    def configuration(self, kind):
        return configuration(transformers, kind)

    def adapted(self, model):
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    def layers(self, model):
        return model.get_base_model().model.layers

    def batch(self, step):
        return [torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))]

    def loss(self, model, tokens):
        return model(input_ids=tokens, labels=tokens).loss


class Flux:
    def __init__(self, folder):
        self.folder = folder

    def load(self, folder, where, dtype, **options):
        # Onto a GPU first: diffusers loads no 4-bit model onto the CPU.
        return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=dtype, **options).to(where)

    def configuration(self, kind):
        return configuration(diffusers, kind)

    def adapted(self, model):
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"]))
        return model

    def layers(self, model):
        return [*model.transformer_blocks, *model.single_transformer_blocks]

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(4, *shape, generator=generator) for shape in ((4, 64), (8, 64), (64,), (4, 64))]

    def loss(self, model, latents, prompts, pooled, targets):
        ids = torch.zeros(12, 3, device=latents.device)
        outputs = model(
            hidden_states=latents,
            encoder_hidden_states=prompts,
            pooled_projections=pooled,
            timestep=torch.ones(len(latents), device=latents.device, dtype=latents.dtype),
            img_ids=ids[:4],
            txt_ids=ids[4:],
        ).sample
        return torch.nn.functional.mse_loss(outputs.float(), targets.float())


def configuration(library, kind):
    if kind == "int8":
        return library.BitsAndBytesConfig(load_in_8bit=True)
    if kind == "quanto-int8":
        return library.QuantoConfig(weights="int8")
    return library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant="double" in kind,
        bnb_4bit_quant_storage=storage(kind),
    )


def storage(kind):
    return getattr(torch, kind.split("-")[-1] if "float" in kind else "uint8")


def load(subject, kind, way, where):
    # FullyShardedDataParallel flattens the parameters of a layer into one, of one dtype: that of the packed weights.
    dtype = storage(kind) if way == "FullyShardedDataParallel" else torch.float32
    if kind.startswith("loaded-"):
        model = subject.load(subject.packed[kind], where, dtype=dtype)
    else:
        model = subject.load(
            subject.folder, where, dtype=dtype, quantization_config=subject.configuration(kind)
        )
    torch.manual_seed(0)
    return subject.adapted(model).train()


def save_packed(subject, kind, way, where, scratch):
    """The checkpoint that "loaded-" kinds come from, written by one process."""
    folder = os.path.join(scratch, f"packed {kind}")
    if dist.get_rank() == 0:
        dtype = storage(kind) if way == "FullyShardedDataParallel" else torch.float32
        quantized = subject.load(
            subject.folder, where, dtype=dtype, quantization_config=subject.configuration(kind)
        )
        quantized.save_pretrained(folder)
    dist.barrier()
    subject.packed = {kind: folder}


def distribute(subject, model, way, where):
    """What is called instead of the model; `fully_shard` changes the model itself."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "FullyShardedDataParallel":
        policy = fsdp_auto_wrap_policy(model)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=where.index
        )
    mesh = init_device_mesh(where.type, (2,))
    for layer in subject.layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_checkpoint(model, optimizer, way, checkpoint):
    if way != "ddp":
        of_model, of_optimizer = get_state_dict(model, optimizer, options=OPTIONS)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=checkpoint)
        return
    if dist.get_rank() == 0:
        torch.save((get_peft_model_state_dict(model), optimizer.state_dict()), checkpoint)
    dist.barrier()


def load_checkpoint(model, optimizer, way, checkpoint):
    if way != "ddp":
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


def norm_of_gradients(trained, way):
    if way != "FullyShardedDataParallel":
        return sum(full(one.grad).pow(2).sum() for one in trained).sqrt().item()
    # What a process does not hold of a parameter has no gradient there.
    total = sum(one.grad.float().pow(2).sum() for one in trained if one.grad is not None)
    dist.all_reduce(total)
    return total.sqrt().item()


def digest_of_adapter(model, trained, way):
    whole = FullyShardedDataParallel.summon_full_params if way == "FullyShardedDataParallel" else nullcontext
    with whole(model):
        adapter = b"".join(full(one.detach()).float().cpu().numpy().tobytes() for one in trained)
    return hashlib.sha256(adapter).hexdigest()


def train(subject, kind, way, where, checkpoint=None, resume=False, alone=False):
    """The loss of each step over the whole batch, the norm of its gradients, and a digest of the adapter at the end."""
    model = load(subject, kind, way, where)
    way = None if alone else way
    parallel = distribute(subject, model, way, where) if way else model
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if resume:
        load_checkpoint(parallel if way == "FullyShardedDataParallel" else model, optimizer, way, checkpoint)
    losses, norms = [], []
    for step in range(SAVED_AFTER if resume else 0, STEPS):
        batch = subject.batch(step)
        if way:
            batch = [tensor.chunk(2)[dist.get_rank()] for tensor in batch]
        batch = [tensor.to(where, model.dtype if tensor.is_floating_point() else None) for tensor in batch]
        loss = subject.loss(parallel, *batch)
        loss.backward()
        loss = loss.detach()
        if way:
            dist.all_reduce(loss)
            loss /= 2
        losses.append(loss.item())
        norms.append(norm_of_gradients(trained, way))
        optimizer.step()
        optimizer.zero_grad()
        if way and not resume and step + 1 == SAVED_AFTER:
            save_checkpoint(
                parallel if way == "FullyShardedDataParallel" else model, optimizer, way, checkpoint
            )
    return losses, norms, digest_of_adapter(parallel, trained, way)


def compare(subject, kind, way, where, scratch):
    if kind.startswith("loaded-"):
        save_packed(subject, kind, way, where, scratch)
    alone, checkpoint = train(subject, kind, way, where, alone=True), os.path.join(scratch, kind)
    together = train(subject, kind, way, where, checkpoint)
    gc.collect()
    resumed = train(subject, kind, way, where, checkpoint, resume=True)
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
    way, on_devices, _ = way.partition(" on devices")
    where = torch.device("cuda", rank) if on_devices else torch.device("cpu")
    if on_devices:
        torch.cuda.set_device(where)
    subject = (Flux if is_flux(folder) else LanguageModel)(folder)
    told = {kind: compare(subject, kind, way, where, scratch) for kind in kinds}
    if rank == 0:
        print("RESULT", json.dumps(told), flush=True)
    # DistributedDataParallel must be gone before the group is.  Otherwise its reducer is the last that holds the group:
    # it waits for a thread of gloo while it holds the interpreter's lock, which that thread wants.  One run in twenty
    # hung so, without this package; a barrier alone did not help.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def is_flux(folder):
    return "FluxTransformer2DModel" in pathlib.Path(folder, "config.json").read_text()


if __name__ == "__main__":
    folder, way, *kinds = sys.argv[1:]
    if is_flux(folder) or "on devices" in way:
        import tests.programs.devices  # noqa: F401
    # Forked before anything runs, so that the imports are paid once.
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(main, args=(folder, way, kinds, scratch), nprocs=2, start_method="fork")
