"""Tiny audio autoencoders with weight normalization, with random weights, in float32 on the CPU."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_MONO = ("LongCatAudioDiTVae", "AutoencoderKLKVAEAudio", "AutoencoderKLMiniMaxH3Audio")


def oobleck() -> Any:
    """The autoencoder of Stable Audio: two channels."""
    import torch
    from diffusers import AutoencoderOobleck

    torch.manual_seed(0)
    return AutoencoderOobleck(
        encoder_hidden_size=8, decoder_channels=8, decoder_input_channels=4, downsampling_ratios=[2, 4],
        channel_multiples=[1, 2], audio_channels=2,
    ).eval()  # fmt: skip


def longcat() -> Any:
    """That of LongCat-Audio: one channel."""
    import torch
    from diffusers import LongCatAudioDiTVae

    torch.manual_seed(0)
    return LongCatAudioDiTVae(
        channels=8, c_mults=[1, 2], strides=[2, 4], latent_dim=4, encoder_latent_dim=8, downsampling_ratio=8
    ).eval()


def cosmos3() -> Any:
    """That of Cosmos 3: two channels."""
    import torch
    from diffusers import Cosmos3AVAEAudioTokenizer

    torch.manual_seed(0)
    return Cosmos3AVAEAudioTokenizer(
        vocoder_input_dim=4, dec_dim=8, dec_c_mults=(1, 2), dec_strides=(2, 4), enc_dim=16, enc_intermediate_dim=16,
        enc_num_layers=1, enc_num_blocks=1, enc_latent_dim=8, enc_c_mults=(1,), enc_strides=(4,),
    ).eval()  # fmt: skip


def kvae() -> Any:
    """KVAE for audio: one channel."""
    import torch
    from diffusers import AutoencoderKLKVAEAudio

    torch.manual_seed(0)
    return AutoencoderKLKVAEAudio(
        encoder_dim=8, encoder_rates=[2, 2], latent_dim=16, codebook_dim=4, decoder_dim=16, decoder_rates=[2, 2],
        attn_num_heads=2,
    ).eval()  # fmt: skip


def same() -> Any:
    """That of Stable Audio 3: two channels."""
    import torch
    from diffusers import AutoencoderSAME

    torch.manual_seed(0)
    return AutoencoderSAME(
        patch_size=16, encoder_channels=16, encoder_c_mults=(2,), encoder_strides=(4,), encoder_transformer_depths=(2,),
        latent_dim=16, dim_heads=16,
    ).eval()  # fmt: skip


def minimax() -> Any:
    """That of MiniMax H3: one channel."""
    import torch
    from diffusers import AutoencoderKLMiniMaxH3Audio

    torch.manual_seed(0)
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=8, encoder_rates=(2, 2), latent_dim=32, latent_channels=8, num_attention_heads=2, decoder_dim=16,
        decoder_rates=(2, 2), decoder_kernel_sizes=(4, 4), resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
    ).eval()  # fmt: skip


def run(model: Any, device: Any, length: int = 4096) -> Any:
    """The latents of a fixed sound, and the sound that they give, flat, on the CPU."""
    import torch

    name = type(model).__name__
    channels = 1 if name in _MONO else 2
    sound = torch.randn(1, channels, length, generator=torch.Generator().manual_seed(1)).to(device)
    options = {"sample_posterior": False} if name == "LongCatAudioDiTVae" else {}  # it adds noise by default
    with torch.no_grad():
        encoded = model.encode(sound, **options)
        encoded = getattr(encoded, "latent_dist", encoded)
        latents = encoded.mode() if hasattr(encoded, "mode") else getattr(encoded, "latents", encoded)
        decoded = model.decode(latents)
    return torch.cat([part.flatten() for part in (latents, getattr(decoded, "sample", decoded))]).cpu()
