"""A program whose own modules are edited and reloaded while it runs, as gradio does in its reload mode.

Argument: the folder of a Flux transformer.
"""
# needs: devices

import hashlib
import importlib
import json
import sys
from pathlib import Path

import torch

from tests.rig import models

OWN = """
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
import torch
class Fluxed(FluxTransformer2DModel):
    EDITION = {edition}
def load(folder):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return Fluxed.from_pretrained(folder, quantization_config=config, torch_dtype=torch.bfloat16)
"""


def edit(edition):
    Path("own_models.py").write_text(OWN.format(edition=edition))
    importlib.invalidate_caches()


sys.path.insert(0, ".")
sys.dont_write_bytecode = True
told = []
for edition in range(3):
    edit(edition)
    if edition == 0:
        import own_models
    elif edition == 1:
        own_models = importlib.reload(own_models)
    else:  # gradio's way: the module is removed and imported again
        del sys.modules["own_models"]
        own_models = importlib.import_module("own_models")
    assert edition == own_models.Fluxed.EDITION
    model = own_models.load(sys.argv[1])
    pipe = models.flux_pipeline(model)
    pipe.enable_model_cpu_offload(device="cuda:0")
    latents = models.call_flux(pipe, device="cuda:0", dtype=torch.bfloat16).cpu()
    told.append(hashlib.sha256(latents.float().numpy().tobytes()).hexdigest())
print("RESULT", json.dumps({"told": told}))
