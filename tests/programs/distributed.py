"""LoRA training of a 4-bit language model with DistributedDataParallel in two processes.

Argument: the folder of the language model.
"""

import hashlib
import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def train(rank, folder, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(sys.argv[1], port), nprocs=2)
