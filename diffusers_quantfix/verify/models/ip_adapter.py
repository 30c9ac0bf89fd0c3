"""Tiny IP-Adapters of the cases and tests, and the models that they are loaded into."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def unet() -> tuple[Any, Any]:
    """A UNet2DConditionModel and an IP-Adapter for it, float32 on the CPU."""
    from .unet import unet

    model = unet()
    return model, [of_unet(model)]


def of_unet(model: Any) -> dict[str, Any]:
    """An IP-Adapter for a UNet of that size, with images of 32 features, float32 on the CPU."""
    random = _random()
    channels, cross = model.config.block_out_channels, model.config.cross_attention_dim
    adapter = {}
    for number, name in enumerate(model.attn_processors):
        if name.endswith("attn1.processor"):
            continue
        block, index = name.split(".")[:2]
        if block == "mid_block":
            width = channels[-1]
        else:
            width = (channels if block == "down_blocks" else channels[::-1])[int(index)]
        for part in "kv":
            adapter[f"{number}.to_{part}_ip.weight"] = random(width, cross)
    return {"image_proj": _projection(cross, random), "ip_adapter": adapter}


def flux() -> tuple[Any, Any]:
    """A FluxTransformer2DModel and an IP-Adapter for it, float32 on the CPU."""
    from .flux import transformer

    model, random = transformer(), _random()
    cross = model.config.joint_attention_dim
    adapter = {}
    for number in range(model.config.num_layers):
        for part in "kv":
            adapter[f"{number}.to_{part}_ip.weight"] = random(model.inner_dim, cross)
            adapter[f"{number}.to_{part}_ip.bias"] = random(model.inner_dim)
    return model, [{"image_proj": _projection(cross, random), "ip_adapter": adapter}]


def sd3() -> tuple[Any, Any]:
    """An SD3Transformer2DModel and an IP-Adapter for it, float32 on the CPU.

    It has one head: upstream's processor views the output of the attention, whose layout depends on the kernel.
    """
    import torch
    from diffusers import SD3Transformer2DModel
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.embeddings import IPAdapterTimeImageProjection

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=1,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ).eval()
    projection = IPAdapterTimeImageProjection(
        embed_dim=32, output_dim=64, hidden_dim=64, heads=1, num_queries=3, timestep_in_dim=32
    )
    image = {}
    renamed = hasattr(model, "_convert_ip_adapter_image_proj_to_diffusers")  # from 0.33 on
    for name, value in projection.state_dict().items():
        for ours, theirs in _SD3_NAMES if renamed else ():
            name = name.replace(ours, theirs)
        image[name] = value
    adapter = {}
    for number, _ in enumerate(model.attn_processors):
        processor = SD3IPAdapterJointAttnProcessor2_0(
            hidden_size=64, ip_hidden_states_dim=64, head_dim=64, timesteps_emb_dim=64
        )
        adapter.update({f"{number}.{name}": value for name, value in processor.state_dict().items()})
    return model, {"image_proj": image, "ip_adapter": adapter}


# The names in a file, where they differ from the module's.
_SD3_NAMES = (
    (".ln0", ".0.norm1"),
    (".ln1", ".0.norm2"),
    (".attn.to_q", ".0.to_q"),
    (".attn.to_kv", ".0.to_kv"),
    (".attn.to_out.0", ".0.to_out"),
    (".adaln_norm", ".1.0"),
    (".ff.net.0.proj", ".1.1"),
    (".ff.net.2", ".1.3"),
    (".adaln_proj", ".2.1"),
)


def run(model: Any, device: Any, dtype: Any = None, image: int = 1) -> Any:
    """The output of any of these models, with an image if an IP-Adapter is loaded, in float32 on the CPU.

    Args:
        model: the model.
        device: where it computes.
        dtype: of its inputs; that of the model by default.
        image: its seed.
    """
    import torch

    config, generator = model.config, torch.Generator().manual_seed(0)
    dtype = dtype or model.dtype

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device, dtype)

    features = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(image)).to(device, dtype)
    with torch.no_grad():
        if "UNet" in type(model).__name__:
            given = (random(1, config.in_channels, 8, 8), torch.tensor(5, device=device))
            text = random(1, 4, config.cross_attention_dim)
            images = {"image_embeds": [features]} if model.encoder_hid_proj is not None else None
            result = model(*given, encoder_hidden_states=text, added_cond_kwargs=images)
        elif "Flux" in type(model).__name__:
            images = {"ip_adapter_image_embeds": [features]} if _has(model, "encoder_hid_proj") else None
            result = model(
                hidden_states=random(1, 16, config.in_channels),
                encoder_hidden_states=random(1, 5, config.joint_attention_dim),
                pooled_projections=random(1, config.pooled_projection_dim),
                timestep=torch.ones(1, device=device, dtype=dtype),
                txt_ids=torch.zeros(5, 3, device=device),
                img_ids=torch.zeros(16, 3, device=device),
                joint_attention_kwargs=images,
            )
        else:
            images = {"ip_adapter_image_embeds": features} if _has(model, "image_proj") else None
            result = model(
                hidden_states=random(1, config.in_channels, 8, 8),
                encoder_hidden_states=random(1, 5, config.joint_attention_dim),
                pooled_projections=random(1, config.pooled_projection_dim),
                timestep=torch.ones(1, device=device, dtype=dtype),
                joint_attention_kwargs=images,
            )
    return result.sample.float().cpu()


def check(name: str, grouped: bool) -> str:
    """Load an IP-Adapter in float32 into a model in bfloat16, and run it.

    Args:
        name: "unet", "flux" or "sd3".
        grouped: whether the model is group-offloaded, from the CPU to the CPU.
    """
    import torch

    from . import group_offload

    model, adapter = globals()[name]()
    model = model.to(torch.bfloat16)
    if grouped:
        group_offload.apply(model, torch.device("cpu"))
    before = {id(parameter) for parameter in model.parameters()}
    model._load_ip_adapter_weights(adapter, low_cpu_mem_usage=False)
    new = [parameter for parameter in model.parameters() if id(parameter) not in before]
    assert new, "the adapter has no layers"
    wrong = [parameter for parameter in new if parameter.dtype != torch.bfloat16]
    assert not wrong, f"{len(wrong)} of {len(new)} new weights do not have the dtype of the model"
    assert torch.isfinite(run(model, "cpu")).all()
    return f"all {len(new)} new weights have the dtype of the model"


def _has(model: Any, name: str) -> bool:
    return getattr(model, name, None) is not None


def _random() -> Any:
    import torch

    generator = torch.Generator().manual_seed(3)
    return lambda *shape: 0.2 * torch.randn(shape, generator=generator)


def _projection(cross: int, random: Any) -> dict[str, Any]:
    import torch

    return {
        "proj.weight": random(4 * cross, 32),
        "proj.bias": random(4 * cross),
        "norm.weight": torch.ones(cross),
        "norm.bias": torch.zeros(cross),
    }
