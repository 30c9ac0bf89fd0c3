"""A small Latte as it is after a quantized load: all in half precision but what no checkpoint holds."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import LatteTransformer3DModel

    torch.manual_seed(0)
    model = LatteTransformer3DModel(
        num_attention_heads=1, attention_head_dim=4, in_channels=1, out_channels=1, num_layers=1, sample_size=2,
        patch_size=2, caption_channels=4, video_length=2, norm_type="ada_norm_single", norm_elementwise_affine=False,
    ).to(torch.bfloat16)  # fmt: skip
    model.temp_pos_embed = model.temp_pos_embed.float()
    inputs = torch.randn(1, 1, 2, 2, 2).to(torch.bfloat16)
    text = torch.randn(1, 1, 4).to(torch.bfloat16)
    with torch.no_grad():
        output = model(inputs, torch.zeros(1, dtype=torch.long), text).sample
    assert output.dtype == inputs.dtype, f"the output is in {output.dtype}"
    return "it runs, and its output is in the dtype of its input"
