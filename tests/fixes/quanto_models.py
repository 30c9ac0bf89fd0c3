"""Small models with weights of optimum-quanto, and what the tests of its fixes share."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

QTYPES = ("qfloat8", "qint8", "qint4", "qint2")
# The greatest error against the unquantized model, as a part of its greatest output: what the rounding costs, doubled.
TOLERANCE = {"float8": 0.08, "int8": 0.035, "int4": 0.35, "int2": 1.2}


@functools.cache
def quanto():
    """The library, or a skip.

    Nothing is compiled in the tests, on the bare side either, but where they are about that: PyTorch unpacks.
    """
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)
    import optimum.quanto
    from optimum.quanto.library.extensions import cpp

    from diffusers_quantfix.weights.quanto_extension import StandIn

    cpp.ext._lib = cpp.ext._lib or StandIn("quanto_cpp", "was not compiled, to save the time")
    return optimum.quanto


def plain_layers(dtype=None, width: int = 256):
    """Two linear layers with a bias."""
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(width, 256), torch.nn.Linear(256, 128))
    return layers.to(dtype or torch.float32).requires_grad_(False)


def layers(qtype: str, dtype=None, width: int = 256):
    """The same, quantized and frozen."""
    model = plain_layers(dtype, width)
    library = quanto()
    library.quantize(model, weights=getattr(library, qtype))
    library.freeze(model)
    return model


def inputs(dtype=None, width: int = 256, rows: int = 3, device="cpu"):
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator).to(device, dtype or torch.float32)


def run(model, *args, **options):
    import torch

    with torch.no_grad():
        return model(inputs(*args, **options))


def assert_saves_no_copy(layer, given) -> None:
    """What ``layer`` keeps for the backward pass is ``given`` itself."""
    import torch

    given, saved = given.detach().requires_grad_(True), []

    def pack(tensor):
        saved.append(tensor.data_ptr() if type(tensor) is torch.Tensor else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(given)
    assert given.data_ptr() in saved


def error(output, reference) -> float:
    """The greatest difference, as a part of the greatest value of the reference."""
    reference = reference.float()
    return float((output.float().cpu() - reference.cpu()).abs().max() / reference.abs().max())


def script(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, with this process's interpreter and settings."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def saved_flux(folder):
    """The folder of a saved tiny Flux transformer."""
    from tests.rig import models

    return models.saved(models.flux_transformer(), folder)


def load_flux(folder, weights: str = "float8", dtype=None, **options):
    """A tiny Flux transformer that diffusers quantizes, or that was saved quantized when ``weights`` is empty."""
    diffusers = pytest.importorskip("diffusers")
    import torch

    quanto()

    if unsupported():
        pytest.skip(unsupported())
    if weights:
        options["quantization_config"] = diffusers.QuantoConfig(weights_dtype=weights)
    return diffusers.FluxTransformer2DModel.from_pretrained(
        folder, torch_dtype=dtype or torch.float16, **options
    )


def load_t5(folder, weights: str = "float8", dtype=None, **options):
    """A tiny T5 encoder that transformers quantizes."""
    import torch
    import transformers

    quanto()

    return transformers.T5EncoderModel.from_pretrained(
        folder,
        quantization_config=transformers.QuantoConfig(weights=weights),
        torch_dtype=dtype or torch.float16,
        **options,
    ).eval()


def run_flux(model, device="cpu", dtype=None):
    import torch

    from tests.rig import models

    return models.call_flux(models.flux_pipeline(model), device, dtype or torch.float16)


def run_t5(model, device="cpu"):
    import torch

    with torch.no_grad():
        return model(torch.arange(8, device=device)[None])[0]


def unsupported() -> str:
    """Why diffusers does not load models with weights of quanto here, as a sentence; empty when it does."""
    from tests.gate import unmet

    return unmet("optimum-quanto>=0.2.6") or unmet("diffusers>=0.33.0")
