"""A data set whose items are encoded by a quantized model, in processes that are forked after it was loaded.

Argument: the folder of a language model.
"""

import hashlib
import json
import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

CONFIGS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


class Encoded(Dataset):
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, at):
        words = torch.randint(0, 64, (1, 8), generator=torch.Generator().manual_seed(at))
        with torch.no_grad():
            return self.model(words).logits[0].float()


def digest(items):
    return hashlib.sha256(b"".join(item.numpy().tobytes() for item in items)).hexdigest()


def first(name):
    return digest([DATA[name][0]])


def main():
    global DATA
    DATA = {
        name: Encoded(
            AutoModelForCausalLM.from_pretrained(
                sys.argv[1], quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
            ).eval()
        )
        for name, options in CONFIGS.items()
    }
    fork = multiprocessing.get_context("fork")
    told = {}
    for when in ("never run", "run"):
        with fork.Pool(2) as pool:
            told[f"pool, {when} before"] = pool.map(first, list(DATA))
        for name, data in DATA.items():
            loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=fork)
            told[f"{name}, {when} before"] = digest(loader)
            told[f"{name}, here"] = digest(data[at] for at in range(len(data)))
    print("RESULT", json.dumps(told))


if __name__ == "__main__":
    main()
