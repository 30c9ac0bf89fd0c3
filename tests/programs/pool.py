"""A pool of spawned workers, each of which receives a quantized model and runs it, as Ray's actors do.

Argument: the folder of a language model.
"""

import hashlib
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

CONFIGS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


def words(model, seed):
    batch = torch.randint(0, 64, (1, 8), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return hashlib.sha256(model(batch).logits.float().numpy().tobytes()).hexdigest()


def start(models):
    global MODELS
    MODELS = models


def work(name, seed):
    return words(MODELS[name], seed)


def main():
    models = {
        name: AutoModelForCausalLM.from_pretrained(
            sys.argv[1], quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
        ).eval()
        for name, options in CONFIGS.items()
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=start, initargs=(models,)) as pool:
        asked = [(name, seed) for name in models for seed in range(2)]
        answers = list(pool.map(work, *zip(*asked, strict=True)))
    told = {f"{name}, {seed}": answer for (name, seed), answer in zip(asked, answers, strict=True)}
    here = {f"{name}, {seed}": words(models[name], seed) for name, seed in asked}
    print("RESULT", json.dumps({"told": here, "as in the workers": told == here}))


if __name__ == "__main__":
    main()
