"""The bottleneck of Stable Audio 3's autoencoder under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from diffusers.models.autoencoders.autoencoder_same import SoftNormBottleneck

    bottleneck = SoftNormBottleneck(2).requires_grad_(False)
    sound = torch.randn(1, 2, 4)
    expected = bottleneck.encode(sound)
    cpu_offload(bottleneck, torch.device("cpu"))
    encoded = bottleneck.encode(sound)
    assert not encoded.is_meta, "the output has no data: it is on meta"
    assert torch.equal(encoded, expected), "the output differs"
    return "encodes the same"
