"""Small models with weights of torchao."""

from __future__ import annotations

import contextlib
import copy
import functools
import types

import pytest

from tests.gate import unmet

WEIGHTS = ("int8", "float8")


@contextlib.contextmanager
def skipped_where_not_saved():
    """Skip where torchao cannot save these weights in safetensors, or transformers says so."""
    try:
        yield
    except ValueError as error:
        if not ("Unsupported tensor type" in str(error) or "is not serializable" in str(error)):
            raise
        pytest.skip("this torchao cannot save these weights in safetensors")


def config(weights: str):
    """How to quantize; the newest form of it that this torchao has."""
    import torch

    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if not hasattr(quantization, "Int8WeightOnlyConfig"):  # before torchao 0.9 functions, of the same names
        if weights == "int4":
            pytest.skip("this torchao has no such weights")
        return getattr(quantization, f"{weights}_weight_only")()
    if weights == "int8":
        # The older form is the one that peft before 0.19 knows.
        newest = not unmet("torchao>=0.15") and not unmet("peft>=0.19")
        return quantization.Int8WeightOnlyConfig(**({"version": 2} if newest else {}))
    if weights == "int4":
        return quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32))
    return quantization.Float8WeightOnlyConfig()


def layers(weights: str, device="cpu"):
    """Two layers of 64 features, quantized on the CPU, on ``device``."""
    import torch

    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    quantization.quantize_(model, config(weights))
    return model.requires_grad_(False).to(device)


def adapted(
    weights: str, device="cpu", names=("one",), targets=(("0", "1"), ("0", "1")), any_layer=False, **options
):
    """These layers with LoRAs, all active, that are large enough to matter; each on the layers in its ``targets``.

    Skips where peft takes these weights for plain ones, unless ``any_layer``.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    how = config(weights)
    model = layers(weights, device)
    # As transformers and diffusers give it to a model that they quantize.
    given = types.SimpleNamespace(get_apply_tensor_subclass=functools.partial(copy.copy, how))
    model.hf_quantizer = types.SimpleNamespace(quantization_config=given)
    for name, target in zip(names, targets, strict=False):
        lora = LoraConfig(r=8, lora_alpha=8, target_modules=list(target), **options)
        if name == names[0]:
            peft = get_peft_model(model, lora, adapter_name=name)
        else:
            peft.add_adapter(name, lora)
    peft.base_model.set_adapter(list(names))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            if "magnitude" in name:
                parameter.mul_(1.5)
    peft = peft.eval().to(device)
    if not any_layer and not all(
        type(part).__name__ == "TorchaoLoraLinear" for part in peft.base_model.model
    ):
        pytest.skip("this peft does not know these weights")
    return peft


def devices_of(model) -> set[str]:
    """Where the weights are, by their own word and by that of their inner tensors."""
    found = set()
    for tensor in model.parameters():
        found.add(str(tensor.device))
        if hasattr(tensor, "__tensor_flatten__"):
            found |= {str(getattr(tensor, name).device) for name in tensor.__tensor_flatten__()[0]}
    return found


def run(model, device="cpu"):
    import torch

    with torch.no_grad():
        return model(torch.linspace(-1, 1, 128, device=device, dtype=torch.bfloat16).view(2, 64)).cpu()
