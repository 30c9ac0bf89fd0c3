"""A weight of an 8-bit transformers model is dequantized after a run."""

from __future__ import annotations


def case(work: str) -> str | None:
    from inspect import signature

    import torch
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    from ..case import CannotReproduce
    from ..models import eight_bit

    options = {"dtype": torch.float32} if "dtype" in signature(dequantize_bnb_weight).parameters else {}
    try:
        return eight_bit.dequantized_after_a_run(dequantize_bnb_weight, **options)
    except NameError as error:  # it does not import an old bitsandbytes
        raise CannotReproduce(f"transformers: Using `bitsandbytes` needs a newer one here: {error}") from None
