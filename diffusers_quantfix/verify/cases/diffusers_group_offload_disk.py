"""A VAE that is group-offloaded to disk is saved, and loaded again."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import torch
    from diffusers import AutoencoderKL
    from diffusers.hooks import apply_group_offloading

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    weights = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    try:
        apply_group_offloading(
            vae,
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            offload_to_disk_path=f"{work}/groups",
        )
    except (AttributeError, TypeError) as error:
        # Before 0.34 there is no such option, and before 0.37 it requires an accelerator.
        raise CannotReproduce(f"this diffusers does not offload to disk here ({error})") from None
    vae.save_pretrained(f"{work}/saved")
    again = AutoencoderKL.from_pretrained(f"{work}/saved").state_dict()
    wrong = [name for name, tensor in weights.items() if not torch.equal(again[name], tensor)]
    assert not wrong, f"{len(wrong)} of {len(weights)} tensors differ after saving and loading"
    return f"saved and loaded a VAE that is offloaded to disk; all {len(weights)} tensors are equal"
