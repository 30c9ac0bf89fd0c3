"""A tiny Nucleus-Image transformer, the model for which diffusers has TextKVCache."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TEXT = 32


def transformer() -> Any:
    """A random model with two blocks, float32 on the CPU, equal at each call."""
    import torch

    from ..case import CannotReproduce

    try:
        from diffusers import NucleusMoEImageTransformer2DModel
    except ImportError:
        raise CannotReproduce("this diffusers has no Nucleus-Image") from None
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
    channels = {"in_channels": 16, "out_channels": 16, "joint_attention_dim": TEXT}
    return NucleusMoEImageTransformer2DModel(
        **sizes, **channels, axes_dims_rope=(4, 6, 6), moe_enabled=False
    ).eval()


def outputs(model: Any, device: Any) -> list[Any]:
    """Three passes with each of two prompts: outputs of shape (1, 4, 16), on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden, *prompts = (
        torch.randn(1, tokens, width, generator=generator).to(device)
        for tokens, width in ((4, 16), (5, TEXT), (5, TEXT))
    )
    found = []
    with torch.no_grad(), model.cache_context("two prompts"):
        for step in range(3):
            for prompt in prompts:
                inputs = {"img_shapes": [(1, 2, 2)], "timestep": torch.ones(1, device=device)}
                output = model(
                    hidden * (step + 1), encoder_hidden_states=prompt, return_dict=False, **inputs
                )[0]
                found.append(output.cpu())
    return found
