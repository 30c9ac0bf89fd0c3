"""Blockwise quantization as bitsandbytes' kernels do it, written out on flat CPU tensors."""

from __future__ import annotations

import torch

CODES = {
    "nf4": torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ]
    ),
    "fp4": torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12,
}


def quantize(values: torch.Tensor, code: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of the nearest code for every value, and the largest magnitude of every block."""
    count = values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -count % blocksize)).view(-1, blocksize)
    absmax = blocks.abs().amax(1)
    scaled = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    parts = [(part[..., None] - code).abs().argmin(-1) for part in scaled.split(512)]  # bounds the memory
    return torch.cat(parts).view(-1)[:count].to(torch.uint8), absmax


def dequantize(
    indices: torch.Tensor, code: torch.Tensor, absmax: torch.Tensor, blocksize: int
) -> torch.Tensor:
    return code.float()[indices.long()] * absmax.float().repeat_interleave(blocksize)[: indices.numel()]


def pack(indices: torch.Tensor) -> torch.Tensor:
    """Two 4-bit indices per byte, the first one in the upper half."""
    indices = torch.nn.functional.pad(indices, (0, indices.numel() % 2))
    return (indices[0::2] << 4) | indices[1::2]


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    packed = packed.reshape(-1).view(torch.uint8)
    return torch.stack([packed >> 4, packed & 15], 1).view(-1)[:count]
