"""A sequentially offloaded VAE is saved, and loaded again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models.vae import save_and_compare, vae

    model = vae()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, torch.device("cpu"))
    return save_and_compare(model, weights, work)
