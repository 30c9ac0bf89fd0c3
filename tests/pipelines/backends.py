"""The configuration with which each backend quantizes the denoisers of diffusers and the encoders of transformers.

GGUF has none: its models are files, see ``gguf_files``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from tests.pipelines import gguf_files

GGUF = "gguf"


def _bitsandbytes(bits: int) -> Callable:
    def config(library: str):
        import torch

        from tests.rig.models import bnb_config

        return bnb_config(library, bits, **({"bnb_4bit_compute_dtype": torch.bfloat16} if bits == 4 else {}))

    return config


def _quanto(library: str):
    if library == "diffusers":
        return importlib.import_module("diffusers").QuantoConfig(weights_dtype="int8")
    return None


def _torchao(library: str):
    if library == "diffusers":
        from torchao.quantization import Int8WeightOnlyConfig

        return importlib.import_module("diffusers").TorchAoConfig(Int8WeightOnlyConfig())
    return None


def _gguf(library: str):
    return None


# name -> function(library) that gives the configuration, or None where the models of that library stay as they are
BACKENDS: dict[str, Callable] = {
    "bnb-nf4": _bitsandbytes(4),
    "bnb-int8": _bitsandbytes(8),
    "quanto-int8": _quanto,
    "torchao-int8": _torchao,
    GGUF: _gguf,
}

# What a backend has no way to do
CANNOT: dict[str, set[str]] = {
    GGUF: {"saved under offload", "device map"},  # it is written by other programs; a file has no string map
}


def takes(kind: type, backend: str) -> bool:
    """Whether a backend has a way to quantize a model of a class of pipelines."""
    if backend != GGUF:
        return True
    return any(gguf_files.is_read(one) for kinds in kind._get_signature_types().values() for one in kinds)
