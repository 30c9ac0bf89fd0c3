"""An ordinary single file is quantized with torchao or quanto while it is loaded."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import diffusers
    import torch

    if _installed("torchao") and hasattr(diffusers, "TorchAoConfig"):
        config, kind = _torchao(diffusers), "torchao"
    elif _installed("optimum.quanto") and hasattr(diffusers, "QuantoConfig"):
        config, kind = diffusers.QuantoConfig(weights_dtype="int8"), "quanto"
    else:
        raise CannotReproduce("needs torchao or optimum-quanto")
    torch.manual_seed(0)
    kind_of_model = diffusers.LTXVideoTransformer3DModel
    kind_of_model(
        in_channels=64,
        out_channels=64,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        num_layers=1,
        caption_channels=64,
    ).to(torch.bfloat16).save_pretrained(f"{work}/plain")
    try:
        model = kind_of_model.from_single_file(
            f"{work}/plain/diffusion_pytorch_model.safetensors",
            config=f"{work}/plain",
            quantization_config=config,
            torch_dtype=torch.bfloat16,
        )
    except ImportError as error:  # diffusers requires newer ones
        raise CannotReproduce(f"diffusers: {error}") from None
    weight = model.get_submodule("transformer_blocks.0.attn1.to_q").weight
    assert type(weight) is not torch.nn.Parameter, f"{kind} did not quantize the model"
    return f"{kind} quantized the weights: {type(weight).__name__}"


def _installed(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package above it
        return False


def _torchao(diffusers):
    from torchao import quantization

    return diffusers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
