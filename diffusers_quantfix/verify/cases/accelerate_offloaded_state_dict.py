"""A sequentially offloaded VAE is saved, and loaded again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    weights = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    cpu_offload(vae, torch.device("cpu"))
    vae.save_pretrained(work)
    again = AutoencoderKL.from_pretrained(work).state_dict()
    wrong = [name for name, tensor in weights.items() if not torch.equal(again[name], tensor)]
    assert not wrong, f"{len(wrong)} of {len(weights)} tensors differ after saving and loading"
    return f"saved and loaded an offloaded VAE; all {len(weights)} tensors are equal"
