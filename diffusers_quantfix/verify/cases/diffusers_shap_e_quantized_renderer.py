"""The renderer of Shap-E has a 4-bit layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.pipelines.shap_e.renderer import ShapERenderer

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    renderer = ShapERenderer(
        param_names=("nerstf.mlp.0.weight",),
        param_shapes=((64, 93),),
        d_latent=64,
        d_hidden=64,
        n_hidden_layers=3,
        insert_direction_at=2,
    ).to(where)
    projection = renderer.params_proj.projections["nerstf__mlp__0__weight"]
    projection.proj = four_bit.linear(projection.proj, where)
    try:
        renderer.decode_to_image(torch.zeros(1, 64, 64, device=where), where, size=4)
    except ValueError as refused:
        if "cannot be quantized" not in str(refused):
            raise
        return "says that it cannot be quantized"
    return "renders"
