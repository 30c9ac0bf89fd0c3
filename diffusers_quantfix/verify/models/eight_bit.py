"""Tiny 8-bit models for the cases, and the memory that they take."""

from __future__ import annotations

import gc

from ..case import NeedsDevice
from . import flux
from .devices import cuda

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FEATURES = 64


def device() -> Any:
    """The first CUDA device, else the CPU if bitsandbytes has 8-bit kernels for it.

    Raises:
        NeedsDevice: there is neither.
    """
    import bitsandbytes
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not hasattr(torch.ops.bitsandbytes, "int8_vectorwise_quant"):
        version = bitsandbytes.__version__
        raise NeedsDevice(f"needs a CUDA device: bitsandbytes {version} has no 8-bit kernels for the CPU")
    return torch.device("cpu")


def layers(where: Any, count: int = 2) -> Any:
    """A model of 8-bit layers [64, 64], quantized by bitsandbytes on ``where``."""
    import torch
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    parts = [Linear8bitLt(FEATURES, FEATURES, has_fp16_weights=False, threshold=6.0) for _ in range(count)]
    return torch.nn.Sequential(*parts).requires_grad_(False).to(where).eval()


def run(model: Any, where: Any) -> Any:
    """The output of ``layers(...)``, on the CPU."""
    import torch

    inputs = torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES)
    with torch.no_grad():
        return model(inputs.to(where)).cpu()


def dequantized_after_a_run(dequantize_bnb_weight: Any, **options: Any) -> str:
    """Dequantize the weight of a layer after a run with a library's function, and compare it with the original."""
    where = cuda()
    model = layers(where, 1)
    rows, scales = model[0].weight.data.clone(), model[0].weight.SCB.view(-1, 1)
    run(model, where)
    weight = dequantize_bnb_weight(model[0].weight, state=model[0].state, **options)
    off = (weight.float() - rows * scales / 127).abs().max().item()
    assert off < 1e-3, f"the dequantized weight is off by {off:.2g}"
    return "the dequantized weight is that of the rows"


def merged_and_unmerged(config: Any) -> str:
    """Merge a peft adapter into an 8-bit layer and unmerge it: the bytes must be the same as before."""
    import torch
    from peft import get_peft_model

    parts = layers(device(), 1)
    parts.is_loaded_in_8bit = True
    torch.manual_seed(1)
    model = get_peft_model(parts, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    layer = model.base_model.model[0]
    # Without a run: on some CPUs that would need the fix of another bug.
    before = layer.get_base_layer().weight.data.clone()
    model.merge_adapter()
    assert not torch.equal(layer.get_base_layer().weight.data, before), "merging has no effect"
    model.unmerge_adapter()
    off = int((layer.get_base_layer().weight.data != before).sum())
    assert not off, f"{off} of {before.numel()} bytes of the weight differ after unmerging"
    return "unmerging restores the weight, bit by bit"


def transformer(work: str, where: Any) -> Any:
    """An 8-bit Flux transformer on ``where``, saved to and loaded from the folder ``work``."""
    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    flux.transformer().save_pretrained(work)
    torch.cuda.set_device(where)
    return FluxTransformer2DModel.from_pretrained(
        work, quantization_config=BitsAndBytesConfig(load_in_8bit=True), torch_dtype=torch.float16
    )


def allocated(where: Any) -> int:
    """The bytes now allocated on a CUDA device."""
    import torch

    gc.collect()
    return int(torch.cuda.memory_allocated(where))
