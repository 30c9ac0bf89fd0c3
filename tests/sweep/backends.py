"""How each quantization backend loads the tiny Flux transformer: the library's own loading path, from disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixes import gguf_models
from tests.rig import models


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _need(*names: str) -> None:
    for name in names:
        if not _installed(name):
            pytest.skip(f"{name} is not installed")


def _plain(folder: Path, dtype, device_map):
    from diffusers import FluxTransformer2DModel

    placement = {} if device_map is None else {"device_map": device_map}
    return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=dtype, **placement)


def _bitsandbytes(bits: int, **options) -> Callable:
    def load(folder: Path, dtype, device_map):
        _need("bitsandbytes")
        from diffusers import FluxTransformer2DModel

        more = {**options, **({"bnb_4bit_compute_dtype": dtype} if bits == 4 else {})}
        return models.load_quantized(FluxTransformer2DModel, folder, bits, device_map, dtype, **more)

    return load


def _configured(make: Callable, *needs: str) -> Callable:
    def load(folder: Path, dtype, device_map):
        _need(*needs)
        from diffusers import FluxTransformer2DModel

        placement = {} if device_map is None else {"device_map": device_map}
        return FluxTransformer2DModel.from_pretrained(
            folder, quantization_config=make(), torch_dtype=dtype, **placement
        )

    return load


def _quanto(weights: str) -> Callable:
    def make():
        from diffusers import QuantoConfig

        return QuantoConfig(weights_dtype=weights)

    return _configured(make, "optimum.quanto")


def _torchao(kind: str) -> Callable:
    def make():
        import torchao.quantization
        from diffusers import TorchAoConfig

        return TorchAoConfig(getattr(torchao.quantization, kind)())

    return _configured(make, "torchao")


def _bfloat16_storage(folder: Path, dtype, device_map):
    """Packed bytes in bfloat16, as FSDP wants them."""
    import torch

    return _bitsandbytes(4, bnb_4bit_quant_storage=torch.bfloat16)(folder, dtype, device_map)


def _gguf(folder: Path, dtype, device_map):
    """From a single file, as GGUF models come; ``folder`` has another seed's weights, which does not matter here."""
    if device_map is not None:
        pytest.skip("diffusers-single-file-device proves this for GGUF")
    place = folder / "gguf"
    place.mkdir(exist_ok=True)
    return gguf_models.transformer(place, compute_dtype=dtype)


BACKENDS: dict[str, Callable] = {
    "plain": _plain,
    "bnb-nf4": _bitsandbytes(4),
    "bnb-nf4-double": _bitsandbytes(4, bnb_4bit_use_double_quant=True),
    "bnb-int8": _bitsandbytes(8),
    "gguf": _gguf,
    "quanto-float8": _quanto("float8"),
    "quanto-int8": _quanto("int8"),
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
}
# For the sweep of actions, where layouts matter.
MORE_BACKENDS: dict[str, Callable] = {
    "bnb-nf4-bfloat16": _bfloat16_storage,
    "quanto-int4": _quanto("int4"),
    "quanto-int2": _quanto("int2"),
    "torchao-float8": _torchao("Float8WeightOnlyConfig"),
}

_NEEDS = {"bnb": "bitsandbytes", "gguf": "gguf", "quanto": "optimum.quanto", "torchao": "torchao"}


def installed(backend: str) -> bool:
    """Whether the library of a backend is there."""
    needed = _NEEDS.get(backend.partition("-")[0])
    return needed is None or _installed(needed)
