"""A host that imports the libraries first and loads its plugins later, from files, as ComfyUI does.

Arguments: the folder of a Flux transformer, and "PACKAGE" where the last plugin to be loaded imports this package.
"""
# needs: devices
# imports the package itself

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import accelerate  # noqa: F401
import bitsandbytes  # noqa: F401
import diffusers  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401

from tests.rig import models

PLUGINS = {
    "loader.py": """
        from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
        def load(folder, dtype):
            config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
            return FluxTransformer2DModel.from_pretrained(folder, quantization_config=config, torch_dtype=dtype)
    """,
    "offload.py": """
        from diffusers import FluxPipeline
        def offload(pipe):
            FluxPipeline.enable_model_cpu_offload(pipe, device="cuda:0")
    """,
    "quantfix.py": "import sys\nif 'PACKAGE' in sys.argv:\n    import diffusers_quantfix\n",
}


def plugins():
    folder = Path("custom_nodes")
    folder.mkdir(exist_ok=True)
    for name, text in PLUGINS.items():
        lines = text.splitlines()
        (folder / name).write_text("\n".join(line.removeprefix("        ") for line in lines))
    found = {}
    for path in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"custom_nodes.{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found[path.stem] = module
    return found


nodes = plugins()
told = []
for _ in range(2):
    pipe = models.flux_pipeline(nodes["loader"].load(sys.argv[1], torch.bfloat16))
    nodes["offload"].offload(pipe)
    latents = models.call_flux(pipe, device="cuda:0", dtype=torch.bfloat16).cpu()
    told.append(hashlib.sha256(latents.float().numpy().tobytes()).hexdigest())
package = sys.modules.get("diffusers_quantfix")
board = {said.id: said.state for said in package.status(load=False)} if package else {}
print("RESULT", json.dumps({"told": told, "states": sorted(set(board.values()))}))
