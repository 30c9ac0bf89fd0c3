"""A VAE that is group-offloaded to disk is saved, and loaded again."""

from __future__ import annotations

from ..case import CannotReproduce
from ..models.vae import save_and_compare, vae


def case(work: str) -> str | None:
    import torch
    from diffusers.hooks import apply_group_offloading

    model = vae()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        apply_group_offloading(
            model,
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            offload_to_disk_path=f"{work}/groups",
        )
    except (AttributeError, TypeError) as error:
        # Before 0.34 there is no such option, and before 0.37 it requires an accelerator.
        raise CannotReproduce(f"this diffusers does not offload to disk here ({error})") from None
    return save_and_compare(model, weights, f"{work}/saved")
