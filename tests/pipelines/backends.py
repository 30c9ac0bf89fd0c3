"""The configuration with which each backend quantizes the denoisers of diffusers and the encoders of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable


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


# name -> function(library) that gives the configuration, or None where the models of that library stay as they are
BACKENDS: dict[str, Callable] = {
    "bnb-nf4": _bitsandbytes(4),
    "bnb-int8": _bitsandbytes(8),
    "quanto-int8": _quanto,
    "torchao-int8": _torchao,
}
