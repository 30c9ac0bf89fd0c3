"""Tiny 4-bit models for the cases, saved to disk and loaded as a user loads them, if this machine can."""

from __future__ import annotations

from ..case import NeedsDevice
from . import t5
from .flux import inputs, transformer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def device(storage: Any = None) -> Any:
    """The first CUDA device, else the CPU if bitsandbytes has 4-bit kernels for it.

    Args:
        storage: the ``torch.dtype`` in which the weights will be packed, if it is not uint8.

    Raises:
        NeedsDevice: there is neither.
    """
    import bitsandbytes
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not hasattr(
        torch.ops.bitsandbytes, "quantize_4bit"
    ):  # since 0.45.4; it can quantize there since 0.46.0
        version = bitsandbytes.__version__
        raise NeedsDevice(f"needs a CUDA device: bitsandbytes {version} has no 4-bit kernels for the CPU")
    if storage is not None and not _is_read_on_the_cpu(storage):
        raise NeedsDevice(
            f"needs a CUDA device: here the CPU reads no 4-bit weights that are packed in {storage}"
        )
    return torch.device("cpu")


def _is_read_on_the_cpu(storage: Any) -> bool:
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    # With compressed statistics, bitsandbytes before 0.49 may crash on the CPU: if all are equal, it divides 0 by 0.
    options = {"quant_type": "nf4", "quant_storage": storage, "compress_statistics": False}
    weight = Params4bit(torch.ones(64, 64), requires_grad=False, **options).to("cpu")
    try:
        dequantize_4bit(weight.data, weight.quant_state)
    except (RuntimeError, AssertionError, NotImplementedError):  # bitsandbytes 0.46 supports uint8 only
        return False
    return True


def flux(folder: str, where: Any) -> Any:
    """A FluxTransformer2DModel with two blocks in nf4 on ``where``, loaded from disk.

    With a GPU it is loaded by ``from_pretrained`` with a quantization config. diffusers refuses that without a GPU ("No
    GPU found. A GPU is needed for quantization."), so on the CPU the model is loaded unquantized, and its Linear layers
    are replaced by bitsandbytes', which quantize on their move to the CPU.
    """
    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    model = plain_flux(folder)
    if where.type == "cuda":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        model = FluxTransformer2DModel.from_pretrained(
            folder, quantization_config=config, torch_dtype=torch.float32
        )
        return model.to(where).eval()
    return quantized(model, where).eval()


def quantized(model: Any, where: Any) -> Any:
    """``model`` with each ``torch.nn.Linear`` replaced by a `linear` on ``where``, in place."""
    import torch

    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear(layer, where))
    return model


def plain_flux(folder: str) -> Any:
    """The unquantized model, float32 on the CPU; the first call saves it to ``folder``."""
    import os

    from diffusers import FluxTransformer2DModel

    if not os.path.exists(os.path.join(folder, "config.json")):
        transformer().save_pretrained(folder)
    return FluxTransformer2DModel.from_pretrained(folder)


def linear(layer: Any, where: Any) -> Any:
    """A ``Linear4bit`` in nf4 on ``where``, with the weights of a ``torch.nn.Linear``."""
    import torch
    from bitsandbytes.nn import Linear4bit

    quantized = Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, torch.float32, quant_type="nf4"
    )
    quantized.load_state_dict(layer.state_dict())
    return quantized.requires_grad_(False).to(where).eval()


def run_flux(model: Any, where: Any) -> Any:
    """The prediction of ``flux(...)`` for fixed inputs, on the CPU."""
    import torch

    with torch.no_grad():
        return model(**{name: tensor.to(where) for name, tensor in inputs().items()}).sample.cpu()


def text_encoder(folder: str, where: Any) -> Any:
    """A T5EncoderModel in nf4 on ``where``, loaded by transformers' ``from_pretrained``."""
    import os

    import torch
    from transformers import BitsAndBytesConfig, T5EncoderModel

    if not os.path.exists(os.path.join(folder, "config.json")):
        t5.encoder().save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return T5EncoderModel.from_pretrained(
        folder, quantization_config=config, device_map={"": str(where)}, torch_dtype=torch.float32
    ).eval()


def encode(model: Any, where: Any) -> Any:
    """The embeddings of ``text_encoder(...)`` for fixed tokens, on the CPU."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([[2, 5, 6, 3]], device=where)).last_hidden_state.cpu()


def states_of(model: Any) -> list[Any]:
    """The quant states of a 4-bit model."""
    found = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    return [state for state in found if state is not None]


def merged_and_unmerged(config: Any, scale: float = 1.0) -> str:
    """Merge a peft adapter into a 4-bit layer and unmerge it: the weight must be the same as before.

    Args:
        config: the adapter's config, for the layer "0".
        scale: the factor for the adapter's parameters.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from peft import get_peft_model

    where = device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(linear(torch.nn.Linear(128, 128), where))
    layers.is_loaded_in_4bit = True
    model = get_peft_model(layers, config).eval()
    layer = model.base_model.model[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(scale)

    def weight() -> Any:
        base = layer.get_base_layer().weight
        return dequantize_4bit(base.data, base.quant_state).float().cpu()

    # Without a run: on some CPUs that would need the fix of another bug.
    before = weight()
    model.merge_adapter()
    assert not torch.equal(weight(), before), "merging has no effect"
    model.unmerge_adapter()
    off = float((weight() - before).norm() / before.norm())
    assert off == 0, f"the weight is off by {off:.2g} after unmerging"
    return "unmerging restores the weight, bit by bit"
