"""A checkpoint with 64 4-bit layers is loaded, and the accesses to its keys are counted."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LAYERS = 64


class Counting(dict[str, object]):
    """A state dict that counts how many of its keys are read in iterations."""

    seen = 0

    def items(self) -> Any:
        for pair in super().items():
            self.seen += 1
            yield pair

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.seen += 1
            yield key


def case(work: str) -> str | None:
    import torch
    from diffusers import BitsAndBytesConfig
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    from ..models import four_bit

    where = four_bit.device()
    plain = [torch.nn.Linear(64, 64, bias=False) for _ in range(LAYERS)]
    source = torch.nn.ModuleList(four_bit.linear(layer, where) for layer in plain)
    checkpoint = Counting({name: tensor.cpu() for name, tensor in source.state_dict().items()})
    quantizer = BnB4BitDiffusersQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=True)
    checkpoint.seen = 0
    for i in range(LAYERS):
        name = f"{i}.weight"
        quantizer.create_quantized_param(source, checkpoint[name], name, where, checkpoint, [])
    seen = checkpoint.seen
    assert seen <= 4 * len(checkpoint), (
        f"loading {LAYERS} layers read {seen} keys; the checkpoint has {len(checkpoint)}"
    )
    return f"loading {LAYERS} layers read {seen} keys; the checkpoint has {len(checkpoint)}"
