"""Why a block of the documentation cannot end well here, whoever runs it: by its error."""

from __future__ import annotations

import re

REASONS = (
    ("a model that is not in the tiny Hub", r"not (fully )?cached|does not appear to have a file|offline mode|"
     r"Cannot find an appropriate cached|LocalEntryNotFound|couldn't connect|is not a local folder|"
     r"Could not find or load 'modular_model_index.json'|path/to/your/cache|"
     r"'\./stable-diffusion-v1-5'|found in directory (\./)?stable-diffusion-v1-5|"  # a clone of its repository
     r"'NoneType' object has no attribute 'expected_components'|KeyError: 'sdxl'|"  # a pipeline of modular blocks
     r"no such modeling files are available|CLIPTokenizer.__init__\(\) missing 2 required|"
     r"Required input 'control_image' is missing"),  # made by a block that is not there
    ("the page's own mistake", r"NameError: name|SyntaxError|IndentationError|auto not supported|"
     r"llm_int8_threshold must be a float|has no attribute 'unet'|isinstance\(\) arg 2 must be a type|"
     r"_workflow_map is not set for SequentialPipelineBlocks|KeyError: 'unet'|"
     r"path should be string, bytes, os.PathLike or integer, not ellipsis|\{your_username\}|"
     r"OPTForCausalLM.__init__\(\) takes 2 positional arguments but 3 were given|"
     r"ModelMixin.__init__\(\) takes 1 positional argument|"
     r"cannot import name 'StableDiffusionXLAutoIPAdapterStep'|"
     r"has no attribute 'sag_unload_ip_adapter'|"
     r"BatchEncoding.to\(\) takes 2 positional arguments|"
     r"cannot import name 'Int8DynamicActivationInt4WeightConfig'|"
     r"cannot import name 'GemliteUIntXWeightOnlyConfig'|"
     r"apply_dynamic_quant|already in use in the model|list of generators of length 3|Caching has already been enabled|"
     r"Only support version 2 with group_size=None|IntxWeightOnlyConfig.__init__\(\) got an unexpected"),
    ("a program of several processes, or of several files",
     r"torch.distributed must be|process group has not been initialized|RANK expected|attempted relative import|"
     r"Can't pickle <function run_inference|tensor_parallel_config|adapter_config.json"),
    ("a tiny model that fits one GPU, where the documented one is spread over two",
     r"found at least two devices, cuda:0 and cuda:1! \(when checking argument for argument mat1"),
    ("inputs of the size of the documented model",
     r"mat1 and mat2 shapes cannot be multiplied \(154x768 and 64x64\)|unet_traced.pt does not exist"),
    # float8 and the packings of int4: torchao's own report names what it requires
    ("kernels of a GPU", r"Requires mslk|issues during automatic conversion of the weights|dummy base class Event"),
    ("a tensor that torchao cannot save", r"Unsupported tensor type: .*Int4OpaqueTensor"),
    ("a library that is not installed",
     r"requires kernels|A valid HQQ version|"
     r"No module named|ModuleNotFoundError|requires .* library|is not installed|requires torchao to be installed|"
     r"package isn't available"),
)  # fmt: skip


def reason(error: str) -> str:
    """The reason for an error; empty if it is not known."""
    return next((name for name, pattern in REASONS if re.search(pattern, error)), "")
