"""A tiny text decoder of UniDiffuser, and calls of the methods that its pipeline calls."""

from __future__ import annotations

from .devices import cuda

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def text_decoder() -> Any:
    """A ``UniDiffuserTextDecoder`` of one layer with random weights, in float32 on the CPU."""
    import torch
    from diffusers import UniDiffuserTextDecoder

    torch.manual_seed(0)
    return UniDiffuserTextDecoder(
        prefix_length=3, prefix_inner_dim=16, prefix_hidden_dim=8, vocab_size=32, n_positions=80,
        n_embd=16, n_layer=1, n_head=2,
    ).eval()  # fmt: skip


def encode(decoder: Any, device: Any) -> Any:
    """The encoding of a fixed prompt that lies on ``device``, on the CPU."""
    import torch

    prompt = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return decoder.encode(prompt.to(device)).cpu()


def captions(decoder: Any, device: Any) -> Any:
    """The tokens of the captions for two fixed encoded prompts, on the CPU."""
    import torch

    encoded = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
    tokens, _ = decoder.generate_captions(encoded.to(device), 1, device=device)
    return tokens.cpu()


def check() -> str:
    """The text decoder encodes a prompt and generates captions under model offload: with the same results?

    Raises:
        NeedsDevice: there is no CUDA device.
    """
    import torch
    from accelerate import cpu_offload_with_hook

    device = cuda()
    on_device = text_decoder().to(device)
    decoder, hook = cpu_offload_with_hook(text_decoder(), device)
    for run in (encode, captions):
        assert torch.equal(run(decoder, device), run(on_device, device)), "the output differs"
        hook.offload()
    return "encodes and generates the same"
