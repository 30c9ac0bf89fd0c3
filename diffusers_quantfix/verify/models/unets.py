"""Tiny UNets that are no UNet2DConditionModel, in the pipelines that load LoRAs into them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAMES = ("UNet3DConditionModel", "Kandinsky3UNet")
_CONFIGS: dict[str, dict[str, Any]] = {
    "UNet3DConditionModel": {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 64,
        "attention_head_dim": 16,
    },
    "Kandinsky3UNet": {
        "block_out_channels": (32, 64),
        "layers_per_block": 3,
        "groups": 8,
        "attention_head_dim": 16,
        "cross_attention_dim": 64,
        "encoder_hid_dim": 64,
        "time_embedding_dim": 64,
    },
}


def unet(name: str) -> Any:
    """A model with random weights, the same in each call, in float32 on the CPU; ``name`` is one of `NAMES`."""
    import diffusers
    import torch

    torch.manual_seed(0)
    return getattr(diffusers, name)(**_CONFIGS[name]).eval()


def pipeline(model: Any) -> Any:
    """A pipeline of one of these models alone."""
    import diffusers

    parts: dict[str, Any] = {
        "unet": model,
        "scheduler": diffusers.DDPMScheduler(),
        "text_encoder": None,
        "tokenizer": None,
    }
    if isinstance(model, diffusers.UNet3DConditionModel):
        return diffusers.TextToVideoSDPipeline(**parts, vae=diffusers.AutoencoderKL())
    return diffusers.Kandinsky3Pipeline(**parts, movq=None)


def run(model: Any, device: Any = "cpu") -> Any:
    """The prediction for fixed inputs, on the CPU: [1, channels, (frames,) height, width]."""
    import diffusers
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, 2, 8, 8) if isinstance(model, diffusers.UNet3DConditionModel) else (1, 4, 8, 8)

    def values(*size: int) -> Any:
        return torch.randn(*size, generator=generator).to(device)

    more = {} if len(shape) == 5 else {"encoder_attention_mask": torch.ones(1, 3, device=device)}
    with torch.no_grad():
        said = model(
            values(*shape), torch.tensor([1], device=device), encoder_hidden_states=values(1, 3, 64), **more
        )
    return said.sample.cpu()


def check(name: str) -> str:
    """Load a LoRA into the UNet of a pipeline, use it at half its strength and take it out again."""
    import torch

    from . import lora

    model = unet(name)
    pipe = pipeline(model)
    without = run(model)
    pipe.load_lora_weights(lora.weights(model, "unet"), adapter_name="lora")
    whole = run(model)
    pipe.set_adapters("lora", 0.5)
    half = run(model)
    assert not torch.equal(whole, without) and not torch.equal(half, whole), "the LoRA has no effect"
    pipe.unload_lora_weights()
    assert torch.allclose(run(model), without, rtol=1e-3, atol=1e-4), (
        "the output is not what it was before the LoRA"
    )
    return f"the LoRA changes the output by {(whole - without).abs().max():.2g}"
