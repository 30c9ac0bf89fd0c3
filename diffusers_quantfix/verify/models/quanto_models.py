"""Tiny models with optimum-quanto weights for the cases."""

from __future__ import annotations

import contextlib

from ..case import CannotReproduce
from .t5 import encoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

QTYPES = ("qfloat8", "qint8", "qint4", "qint2")


def plain_layers(dtype: Any = None, width: int = 256) -> Any:
    """Two linear layers with a bias, on the CPU."""
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(width, 256), torch.nn.Linear(256, 128))
    return layers.to(dtype or torch.float32).requires_grad_(False)


def layers(qtype: str, dtype: Any = None, width: int = 256) -> Any:
    """`plain_layers`, quantized and frozen."""
    from optimum import quanto

    model = plain_layers(dtype, width)
    quanto.quantize(model, weights=getattr(quanto, qtype))
    quanto.freeze(model)
    return model


def run(model: Any, dtype: Any = None, width: int = 256, rows: int = 3) -> Any:
    """The output for fixed random inputs."""
    import torch

    generator = torch.Generator().manual_seed(1)
    given = torch.randn(rows, width, generator=generator).to(dtype or torch.float32)
    with torch.no_grad():
        return model(given)


def error(output: Any, reference: Any) -> float:
    """The largest difference, relative to the largest value of the reference."""
    return float((output.float() - reference.float()).abs().max() / reference.float().abs().max())


def counting() -> Any:
    """A dispatch mode that counts, in ``quantized``, the weights that quanto quantizes in it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        quantized = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "quanto" and func.__name__.startswith("quantize_"):
                self.quantized += 1
            return func(*args, **(kwargs or {}))

    return Counting()


def merged_and_unmerged(config: Any) -> str:
    """Merge a peft adapter into 8-bit weights, and unmerge it."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(layers("qint8"), config).eval()
    with_adapter = run(model)
    with model.disable_adapter():
        without = run(model)
    model.merge_adapter()
    merged = run(model)
    assert not torch.equal(merged, without), "after merging the output is that without the adapter"
    off = error(merged, with_adapter)
    assert off < 0.05, f"relative error after merging: {off:.3f}"
    model.unmerge_adapter()
    assert torch.equal(run(model), with_adapter), "after unmerging the output is not what it was"
    return f"relative error {off:.3f} after merging, from rounding; exact after unmerging"


def t5(folder: str, weights: str) -> Any:
    """A tiny T5 encoder in float16, quantized by transformers.

    Args:
        folder: the model's folder.
        weights: the type of the quantized weights.
    """
    import torch
    from transformers import QuantoConfig, T5EncoderModel

    encoder().save_pretrained(folder)
    return T5EncoderModel.from_pretrained(
        folder, quantization_config=QuantoConfig(weights=weights), torch_dtype=torch.float16
    ).eval()


def flux(folder: str, weights: str = "", kept: list[str] | None = None) -> Any:
    """A tiny Flux transformer, quantized by diffusers, with the other weights in float32.

    Args:
        folder: the model's folder.
        weights: the type of the quantized weights; "" loads a model that was saved quantized.
        kept: the modules that are not quantized.

    Raises:
        CannotReproduce: these releases of diffusers and quanto do not work together.
    """
    import os

    import diffusers
    import torch

    from .four_bit import plain_flux

    if weights and not os.path.exists(os.path.join(folder, "config.json")):
        plain_flux(folder)
    options: dict[str, Any] = {}
    if weights:
        options["quantization_config"] = diffusers.QuantoConfig(
            weights_dtype=weights, modules_to_not_convert=kept
        )
    try:
        return diffusers.FluxTransformer2DModel.from_pretrained(
            folder, torch_dtype=torch.float32, **options
        ).eval()
    except ImportError as error:  # diffusers requires 0.2.6 or newer
        raise CannotReproduce(f"diffusers: {error}") from None


@contextlib.contextmanager
def no_compiler() -> Iterator[list[str]]:
    """In the block, every compilation by quanto fails, as without a toolchain. Yields the list of attempts."""
    from unittest import mock

    from optimum.quanto.library.extensions import cpp, extension

    attempts: list[str] = []

    def load(**arguments: Any) -> None:
        attempts.append(arguments["name"])
        raise RuntimeError("Ninja is required to load C++ extensions (pip install ninja to get it)")

    # The extension's attributes are restored afterwards.
    with mock.patch.object(extension, "load", load), mock.patch.dict(vars(cpp.ext), {"_lib": None}):
        yield attempts
