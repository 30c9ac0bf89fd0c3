"""A small prior of Stable Cascade, and its pipeline."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def prior() -> Any:
    """A `StableCascadeUNet` with embeddings of 64 features."""
    import torch
    from diffusers.models import StableCascadeUNet

    torch.manual_seed(0)
    return StableCascadeUNet(
        in_channels=16,
        out_channels=16,
        conditioning_dim=64,
        block_out_channels=(64, 64),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_in_channels=64,
        clip_text_pooled_in_channels=64,
        clip_image_in_channels=64,
        dropout=(0.0, 0.0),
        switch_level=(False,),
    ).eval()


def run(model: Any, where: Any) -> Any:
    """The image embeddings of two steps, on the CPU."""
    import torch
    from diffusers import DDPMWuerstchenScheduler, StableCascadePriorPipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    config = CLIPTextConfig(
        hidden_size=64,
        projection_dim=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    pipeline = StableCascadePriorPipeline(
        tokenizer=None,
        text_encoder=CLIPTextModelWithProjection(config).to(where, dtype),  # only its dtype is read
        prior=model,
        scheduler=DDPMWuerstchenScheduler(),
        image_encoder=None,
        feature_extractor=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(1)

    def embeddings(*shape: int) -> Any:
        return torch.randn(*shape, generator=noise).to(where, dtype)

    output = pipeline(
        prompt_embeds=embeddings(1, 8, 64),
        prompt_embeds_pooled=embeddings(1, 1, 64),
        negative_prompt_embeds=embeddings(1, 8, 64),
        negative_prompt_embeds_pooled=embeddings(1, 1, 64),
        height=64,
        width=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    )
    return output.image_embeddings.float().cpu()
