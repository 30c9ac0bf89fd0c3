"""How each quantization backend loads the tiny Flux transformer: the library's own loading path, from disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixes import gguf_models
from tests.marks import rest_is_whole
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


def _plain(folder: Path, dtype, device_map=None, model_class=None, **more):
    from diffusers import FluxTransformer2DModel

    placement = {} if device_map is None else {"device_map": device_map}
    kind = model_class or FluxTransformer2DModel
    return kind.from_pretrained(folder, torch_dtype=dtype, **placement, **more)


def _bitsandbytes(bits: int, **options) -> Callable:
    def make(dtype):
        more = {**options, **({"bnb_4bit_compute_dtype": dtype} if bits == 4 else {})}
        return models.bnb_config("diffusers", bits, **more)

    return _configured(make, "bitsandbytes")


def _configured(make: Callable, *needs: str) -> Callable:
    def load(folder: Path, dtype, device_map=None, **more):
        _need(*needs)
        return _plain(folder, dtype, device_map, quantization_config=make(dtype), **more)

    load.make = make  # the configuration alone
    return load


def _quanto(weights: str) -> Callable:
    def make(dtype):
        from diffusers import QuantoConfig

        return QuantoConfig(weights_dtype=weights)

    return _configured(make, "optimum.quanto")


def _torchao(kind: str) -> Callable:
    def make(dtype):
        from diffusers import TorchAoConfig
        from torchao import quantization

        return TorchAoConfig(getattr(quantization, kind)())

    return _configured(make, "torchao")


def _gguf(folder: Path, dtype, device_map=None):
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
# Other layouts and numbers, on request.
MORE_BACKENDS: dict[str, Callable] = {
    "bnb-nf4-bfloat16": _bitsandbytes(4, bnb_4bit_quant_storage="bfloat16"),
    "bnb-nf4-float16": _bitsandbytes(4, bnb_4bit_quant_storage="float16"),
    "bnb-nf4-float32": _bitsandbytes(4, bnb_4bit_quant_storage="float32"),
    "quanto-int4": _quanto("int4"),
    "quanto-int2": _quanto("int2"),
    "torchao-float8": _torchao("Float8WeightOnlyConfig"),
}
ALL_BACKENDS = {**BACKENDS, **MORE_BACKENDS}


OFTEN = ("bnb-nf4", "bnb-int8", "quanto-int8")


def in_turn(*without: str) -> list:
    """For `parametrize`: every backend but these, most of them on request.

    Of the three of `OFTEN` one runs with the other tests, in turn, and the others in the project's check.
    """
    return rest_is_whole((name for name in ALL_BACKENDS if name not in without), *OFTEN)


_NEEDS = {"bnb": "bitsandbytes", "gguf": "gguf", "quanto": "optimum.quanto", "torchao": "torchao"}


def installed(backend: str) -> bool:
    """Whether the library of a backend is there."""
    needed = _NEEDS.get(backend.partition("-")[0])
    return needed is None or _installed(needed)
