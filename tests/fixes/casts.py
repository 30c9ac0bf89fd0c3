"""Pipelines with a quantized component, to be cast."""

from __future__ import annotations

import contextlib

import pytest

from tests.fixes import gguf_models
from tests.gate import unmet
from tests.rig import models


def dtypes(pipeline) -> dict:
    """Component -> the dtypes of its floating tensors."""
    import torch

    return {
        name: {str(t.dtype)[6:] for t in part.state_dict().values() if t.is_floating_point()}
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }


def pipeline(transformer, **components):
    """A FluxPipeline around ``transformer`` with a VAE and a CLIP text encoder."""
    parts = {"vae": models.vae(), "text_encoder": models.clip_text(), **components}
    return models.flux_pipeline(transformer, **parts)


def torchao_config(library):
    """8-bit weights by torchao; skips where it is not there."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if not hasattr(library, "TorchAoConfig"):
        pytest.skip("this release knows no torchao")
    return library.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def quanto_config(library, weights="int8"):
    """8-bit weights by quanto; skips where it is not there."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    if not hasattr(library, "QuantoConfig"):
        pytest.skip("this release knows no quanto")
    if library.__name__ == "diffusers" and (reason := unmet("optimum-quanto>=0.2.6")):
        pytest.skip(f"diffusers: {reason}")
    name = "weights_dtype" if library.__name__ == "diffusers" else "weights"
    return library.QuantoConfig(**{name: weights})


def loaded(backend: str, folder, model_class=None):
    """A Flux transformer, or a model of another class, quantized by ``backend`` on the CPU, in float32 otherwise."""
    import importlib

    import torch
    from diffusers import FluxTransformer2DModel

    model_class = model_class or FluxTransformer2DModel
    if backend == "gguf":
        return gguf_models.transformer(folder)
    library = importlib.import_module(model_class.__module__.partition(".")[0])
    config = {"torchao": torchao_config, "quanto": quanto_config}[backend](library)
    source = models.flux_transformer() if library.__name__ == "diffusers" else models.t5_encoder()
    source.save_pretrained(folder)
    options = {} if library.__name__ == "diffusers" else {"device_map": "cpu"}
    return model_class.from_pretrained(
        folder, quantization_config=config, torch_dtype=torch.float32, **options
    )


@contextlib.contextmanager
def unchanged(model):
    """Neither a dtype nor a value of ``model`` is another one after the block."""
    import torch

    before = {name: (t.dtype, t.detach().clone()) for name, t in plain(model).items()}
    yield
    for name, tensor in plain(model).items():
        dtype, value = before[name]
        assert tensor.dtype == dtype, f"{name} was {dtype}, it is {tensor.dtype}"
        assert torch.equal(tensor, value), f"{name} has other values"


def plain(model) -> dict:
    """The tensors of a model as they lie in memory, those of subclasses taken apart where they can be."""
    found = {}

    def take_apart(name, tensor):
        if hasattr(tensor, "__tensor_flatten__"):
            for key in tensor.__tensor_flatten__()[0]:
                take_apart(f"{name}.{key}", getattr(tensor, key))
        else:
            found[name] = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor

    for name, tensor in model.state_dict().items():
        take_apart(name, tensor)
    return found
