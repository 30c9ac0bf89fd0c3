"""The tiny VAE of the cases and tests."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def vae(seed: int = 0, **config: Any) -> Any:
    """A random AutoencoderKL whose latents fit `flux.transformer`, float32 on the CPU."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    defaults = {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 16,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "sample_size": 32,
    }
    return AutoencoderKL(**{**defaults, **config}).eval()


def save_and_compare(model: Any, weights: dict[str, Any], folder: str) -> str:
    """Save an offloaded `vae` into ``folder``, load it, and compare it with ``weights``, its state dict before."""
    import torch
    from diffusers import AutoencoderKL

    model.save_pretrained(folder)
    again = AutoencoderKL.from_pretrained(folder).state_dict()
    wrong = [name for name, tensor in weights.items() if not torch.equal(again[name], tensor)]
    assert not wrong, f"{len(wrong)} of {len(weights)} tensors differ after saving and loading"
    return f"saved and loaded an offloaded VAE; all {len(weights)} tensors are equal"
