"""The configuration with which each backend quantizes the denoisers of diffusers and the encoders of transformers.

GGUF has none: its models are files, see ``gguf_files``. Nor has ``plain``, un-quantized.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from tests.pipelines import gguf_files

GGUF = "gguf"
PLAIN = "plain"  # un-quantized


def _bitsandbytes(bits: int) -> Callable:
    def config(library: str):
        import torch

        from tests.rig.models import bnb_config

        return bnb_config(library, bits, **({"bnb_4bit_compute_dtype": torch.bfloat16} if bits == 4 else {}))

    return config


def _quanto(library: str):
    if library == "diffusers":
        return importlib.import_module("diffusers").QuantoConfig(weights_dtype="int8")
    return importlib.import_module("transformers").QuantoConfig(weights="int8")


def _torchao(library: str):
    from torchao.quantization import Int8WeightOnlyConfig

    return importlib.import_module(library).TorchAoConfig(Int8WeightOnlyConfig())


def _none(library: str):
    return None


# name -> function(library) that gives the configuration, or None where the models of that library stay as they are
BACKENDS: dict[str, Callable] = {
    "bnb-nf4": _bitsandbytes(4),
    "bnb-int8": _bitsandbytes(8),
    "quanto-int8": _quanto,
    "torchao-int8": _torchao,
    GGUF: _none,
    PLAIN: _none,
}

# (backend, library) -> the library cannot save what it quantized: its models are quantized at each load
UNSAVED = {("quanto-int8", "transformers")}

# (backend, class of a component) -> why it stays as it is
REFUSED = {
    (
        "torchao-int8",
        "ClapModel",
    ): "ValueError of torchao 0.18 where a saved model is loaded: it has tensors of its own, logit_scale_a, and "
    "unflatten_tensor_state_dict wants a dot in each name",
}

# Pipelines of convolutions alone, which no backend quantizes: they run un-quantized
CONVOLUTIONS = {"LTXLatentUpsamplePipeline", "LTX2LatentUpsamplePipeline"}

# What a backend has no way to do
CANNOT: dict[str, set[str]] = {
    GGUF: {"saved under offload", "device map"},  # it is written by other programs; a file has no string map
}


# The module without which a backend is not there: older release sets have not all of them
_MODULES = {"bnb": "bitsandbytes", "quanto": "optimum.quanto", "torchao": "torchao", "gguf": "gguf"}


@functools.cache
def is_installed(backend: str) -> bool:
    if backend == PLAIN:
        return True
    try:
        return importlib.util.find_spec(_MODULES[backend.partition("-")[0]]) is not None
    except ModuleNotFoundError:  # the package above it
        return False


def takes(kind: type, backend: str) -> bool:
    """Whether a backend is installed, and has a way to quantize a model of a class of pipelines, or is ``plain``."""
    if not is_installed(backend) or (backend != PLAIN and kind.__name__ in CONVOLUTIONS):
        return False
    if backend != GGUF:
        return True
    if not hasattr(kind, "_get_signature_types"):  # a modular pipeline: its components come from its blocks
        return False
    return any(gguf_files.is_read(one) for kinds in kind._get_signature_types().values() for one in kinds)
