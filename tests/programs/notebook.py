"""A notebook, executed by a real Jupyter kernel.

Arguments: the folder of a Flux transformer, and "PACKAGE" where its first cell imports this package.
"""
# imports the package itself

import json
import sys

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

DEVICES = "import tests.programs.devices"
CELLS = [
    "%load_ext autoreload\n%autoreload 2",
    "import hashlib\nimport torch\nfrom diffusers import BitsAndBytesConfig, FluxTransformer2DModel\n"
    "from tests.rig import models",
    "config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')\n"
    "model = FluxTransformer2DModel.from_pretrained({folder!r}, quantization_config=config,"
    " torch_dtype=torch.bfloat16)",
    "pipe = models.flux_pipeline(model)\npipe.enable_model_cpu_offload(device='cuda:0')",
    "def picture():\n"
    "    latents = models.call_flux(pipe, device='cuda:0', dtype=torch.bfloat16).cpu()\n"
    "    return hashlib.sha256(latents.float().numpy().tobytes()).hexdigest()\n"
    "picture()",
    "%timeit -n1 -r1 -q picture()\npicture()",
]

cells = [DEVICES, *(cell.replace("{folder!r}", repr(sys.argv[1])) for cell in CELLS)]
if "PACKAGE" in sys.argv:
    cells.insert(0, "import diffusers_quantfix")
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
# Files for its channels: a port that was found free may be taken when the kernel binds it.
kernel = AsyncKernelManager(kernel_name="python3", transport="ipc")
NotebookClient(notebook, timeout=200, km=kernel).execute()
told = [
    output["data"]["text/plain"]
    for cell in notebook.cells
    for output in cell["outputs"]
    if output["output_type"] == "execute_result"
]
streams = [
    output["text"] for cell in notebook.cells for output in cell["outputs"] if output.get("name") == "stdout"
]
print("RESULT", json.dumps({"told": told, "standard output": streams}))
