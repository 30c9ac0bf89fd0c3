"""QLoRA training of four steps on GPUs under `accelerate launch`, which saves its state after the second.

Sharded with FSDP where the launcher says so; each process then has its part of the batch.  Arguments: the folder of a
language model, "nf4-" and the dtype in which the weights are packed, or the dtype alone for a model that is not
quantized, and "resume" for a training that goes on where another has saved its state.
"""
# needs: devices

import hashlib
import json
import os
import sys

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def main(folder, kind, first):
    # The default is NCCL, which wants real GPUs; one process has no group.
    group = [InitProcessGroupKwargs(backend="gloo")] if "LOCAL_RANK" in os.environ else []
    accelerator = Accelerator(kwargs_handlers=group)
    plugin, count = getattr(accelerator.state, "fsdp_plugin", None), accelerator.num_processes
    dtype = getattr(torch, kind.removeprefix("nf4-"))
    options = {}
    if kind.startswith("nf4-"):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": accelerator.device}, **options
    )
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if plugin is not None:
        plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if first:
        accelerator.load_state("state")
    losses = []
    for step in range(first, 4):
        batch = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        batch = batch.chunk(count)[accelerator.process_index].to(accelerator.device)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if step == 1:
            accelerator.save_state("state")
    adapter = whole(model)
    if accelerator.is_main_process:
        digest = hashlib.sha256(b"".join(adapter[name].numpy().tobytes() for name in sorted(adapter)))
        print("RESULT", json.dumps({
            "losses": losses, "adapter": digest.hexdigest(), "processes": count,
            "model": type(model).__name__,
        }), flush=True)  # fmt: skip
    accelerator.end_training()


def whole(model):
    """What is trained, on the CPU, in float32."""

    def all_of(model):
        return {name: full(one) for name, one in model.named_parameters() if one.requires_grad}

    def full(tensor):
        tensor = tensor.detach()
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().cpu().clone()

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return all_of(model)
    return all_of(model)


if __name__ == "__main__":
    main(*sys.argv[1:3], 2 if "resume" in sys.argv else 0)
