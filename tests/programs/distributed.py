"""LoRA training of a 4-bit language model with DistributedDataParallel in two processes.

Argument: the folder of the language model.
"""

import gc
import hashlib
import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def train(rank, folder):
    torch.manual_seed(0)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    parallel = DistributedDataParallel(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(2):
        batch = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        parallel(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in trained)).hexdigest()
    digests = [None, None]
    dist.all_gather_object(digests, digest)
    if rank == 0:
        print(
            "RESULT",
            json.dumps({"equal in both processes": len(set(digests)) == 1, "adapter": digest}),
            flush=True,
        )


def main(rank, folder, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(rank, folder)
    # DistributedDataParallel must be gone before the group is.  Otherwise its reducer is the last that holds the group:
    # it waits for a thread of gloo while it holds the interpreter's lock, which that thread wants.  One run in twenty
    # hung so, without this package; a barrier alone did not help.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(sys.argv[1], f"{folder}/store"), nprocs=2)
