"""QLoRA training of four steps under `accelerate launch`, which saves its state after the second.

Arguments: the folder of a language model, the kind of quantization, and "die" for a training that is killed in its
third step, or "resume" for one that goes on where such a training has saved its state.
"""

import hashlib
import json
import os
import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig

KINDS = {
    "nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "quanto-int8": lambda: QuantoConfig(weights="int8"),
}


def die(gradient):
    os.killpg(0, signal.SIGKILL)  # the launcher too


def main(folder, kind, first):
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=KINDS[kind](), device_map={"": "cpu"}
    )
    model = prepare_model_for_kbit_training(model)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if first:
        accelerator.load_state("state")
    losses = []
    for step in range(first, 4):
        batch = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        if step == 2 and "die" in sys.argv:
            trained[0].register_hook(die)  # in the middle of the backward pass
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            accelerator.save_state("state")
    adapter = get_peft_model_state_dict(accelerator.unwrap_model(model))
    digest = hashlib.sha256(b"".join(adapter[name].numpy().tobytes() for name in sorted(adapter))).hexdigest()
    print("RESULT", json.dumps({"losses": losses, "adapter": digest}))


if __name__ == "__main__":
    main(*sys.argv[1:3], 2 if "resume" in sys.argv else 0)
