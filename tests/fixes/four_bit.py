"""4-bit layers and models for tests, and what belongs to them."""

from __future__ import annotations

import contextlib
import os

import pytest

from diffusers_quantfix.weights.companions import companions
from tests.rig import models

FEATURES = 128

quantizations = pytest.mark.parametrize(
    ("quant_type", "double_quant"),
    [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)],
    ids=["nf4", "nf4-double", "fp4", "fp4-double"],
)


def linear(
    device,
    quant_type: str = "nf4",
    double_quant: bool = False,
    seed: int = 0,
    bias: bool = True,
    **options,
):
    """A ``Linear4bit`` [FEATURES, FEATURES], quantized by bitsandbytes on its way to ``device``."""
    import torch
    from bitsandbytes.nn import Linear4bit

    # Not torch.manual_seed, which formats the stack for every device that is not there: as slow as to quantize.
    torch.default_generator.manual_seed(seed)
    layer = Linear4bit(
        FEATURES,
        FEATURES,
        bias=bias,
        compute_dtype=torch.float32,
        compress_statistics=double_quant,
        quant_type=quant_type,
        **options,
    )
    return layer.to(device).eval()


def stack(device, quant_type: str = "nf4", double_quant: bool = False, layers: int = 2, **options):
    """A model of 4-bit layers with a normal one between them, on ``device``."""
    import torch

    parts = [linear(device, quant_type, double_quant, seed=i, **options) for i in range(layers)]
    return torch.nn.Sequential(*parts[:1], torch.nn.LayerNorm(FEATURES, device=device), *parts[1:]).eval()


def embedding(device, quant_type: str = "nf4"):
    """An ``Embedding4bit`` [64, FEATURES] on ``device``; skips where bitsandbytes has none."""
    import torch

    nn = pytest.importorskip("bitsandbytes.nn")
    if not hasattr(nn, "Embedding4bit"):
        pytest.skip("Embedding4bit came with bitsandbytes 0.44.0")
    torch.manual_seed(0)
    return nn.Embedding4bit(64, FEATURES, quant_type=quant_type).to(device).eval()


def batch(device, rows: int = 3):
    """Inputs [rows, FEATURES]; one row takes the gemv path on CUDA, which reads ``code``."""
    import torch

    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(7)).to(device)


def run(model, device, rows: int = 3):
    """The output of ``model`` on ``device``, on the CPU."""
    import torch

    with torch.no_grad():
        return model(batch(device, rows)).cpu()


def look_up(model, device):
    """The rows that an embedding gives, on the CPU."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([0, 5, 63], device=device)).cpu()


def layers_of(model) -> list:
    """The 4-bit layers of a model."""
    return [module for module in model.modules() if type(module).__name__ in ("Linear4bit", "Embedding4bit")]


def assert_whole(model, device) -> None:
    """Every 4-bit weight and every tensor of its quant state is on ``device``."""
    import torch

    device, layers = torch.device(device), layers_of(model)
    assert layers
    for layer in layers:
        assert type(layer.weight).__name__ == "Params4bit"
        assert layer.weight.device == device, f"the weight is on {layer.weight.device}, not on {device}"
        found = list(companions(layer))
        assert {"weight.quant_state.absmax", "weight.quant_state.code"} <= {one.name for one in found}
        for one in found:
            assert one.tensor.device == device, f"{one.name} is on {one.tensor.device}, not on {device}"


def bytes_of(model) -> int:
    """What the weights of ``model`` take with all their companions, layer by layer.

    Layers may share a table (the code of the nested state); each needs it on its device.
    """
    total = 0
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        tensors += [one.tensor for one in companions(module)]
        assert not any(tensor.is_meta for tensor in tensors)
        total += sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}.values())
    return total


def state_of(model) -> dict:
    """A copy of the state dict on the CPU; it is taken before a CPU with AVX512-BF16 repacks the layers."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def differences(one: dict, other: dict) -> list[str]:
    """The names under which two state dicts differ."""
    import torch

    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name].cpu(), other[name].cpu())
    )


@contextlib.contextmanager
def skip_for_other_reasons():
    """Skip where these releases do not load, or do not offload, a quantized model for a reason of their own."""
    try:
        yield
    except TypeError as error:
        if "_is_hf_initialized" not in str(error) or os.environ.get("DIFFUSERS_QUANTFIX") != "off":
            raise
        # transformers 5 marks parameters with an attribute that bitsandbytes < 0.50 does not take back
        pytest.skip("without bnb-param-kwargs these releases cannot load or offload 4-bit text encoders")
    except ImportError as error:
        if "requires bitsandbytes" not in str(error):
            raise
        pytest.skip(f"this transformers wants a newer bitsandbytes: {error}")
    except ValueError as error:
        off = os.environ.get("DIFFUSERS_QUANTFIX") == "off"
        if not off or "`.to` is not supported for `8-bit`" not in str(error):
            raise
        pytest.skip("no 8-bit model of diffusers loads here (diffusers-8bit-model-gate)")
    except (AttributeError, RuntimeError) as error:
        # The first is a slip in its check of the devices, on the way to say the second.
        sentences = "'frozenset' object has no attribute 'discard'", "None of the available devices"
        if not any(sentence in str(error) for sentence in sentences):
            raise
        pytest.skip("this transformers does not quantize without a GPU")


def load(model_class, folder, **options):
    """``from_pretrained`` in 4 bits; skips where another defect forbids it."""
    with skip_for_other_reasons():
        return models.load_quantized(model_class, folder, **options)


@contextlib.contextmanager
def current_device_kept():
    """The current CUDA device is the same after the block as before."""
    import torch

    before = torch.cuda.current_device()
    yield
    after = torch.cuda.current_device()
    assert after == before, f"the current device was cuda:{before}, it is cuda:{after} now"
