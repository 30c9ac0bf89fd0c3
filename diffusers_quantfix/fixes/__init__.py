"""The fixes, one file each, and the list by which the watcher knows them.

The list repeats two facts of the declarations, so that a start of the interpreter reads one file instead of all;
a test holds the two against each other.
"""

from __future__ import annotations

# id -> (file below this package, target module)
INDEX: dict[str, tuple[str, str]] = {
    "accelerate-8bit-offload-state": ("accelerate.eight_bit_offload_state", "accelerate.hooks"),
    "bnb-current-device": ("bitsandbytes.current_device", "bitsandbytes.functional"),
    "bnb-int8-requantize": ("bitsandbytes.int8_requantize", "bitsandbytes.nn.modules"),
    "bnb-linear8bit-move": ("bitsandbytes.linear8bit_move", "bitsandbytes.nn.modules"),
    "bnb-quant-state-code": ("bitsandbytes.quant_state_code", "bitsandbytes.functional"),
    "bnb-quant-state-meta": ("bitsandbytes.quant_state_meta", "bitsandbytes.nn.modules"),
    "diffusers-8bit-offload-detection": (
        "diffusers.eight_bit_offload_detection",
        "diffusers.pipelines.pipeline_utils",
    ),
    "diffusers-meta-component-device": ("diffusers.meta_component_device", "diffusers.models.modeling_utils"),
    "diffusers-meta-pipeline-device": ("diffusers.meta_pipeline_device", "diffusers.pipelines.pipeline_utils"),
    "transformers-meta-component-device": ("transformers.meta_component_device", "transformers.modeling_utils"),
}

# The distributions whose versions decide, in the order in which people think of them.
DISTRIBUTIONS = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "optimum-quanto",
    "gguf",
    "torchao",
    "peft",
    "wrapt",
    "packaging",
)
