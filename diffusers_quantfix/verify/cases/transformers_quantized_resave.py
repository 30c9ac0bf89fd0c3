"""A 4-bit text encoder is loaded from its checkpoint and saved again."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from transformers import T5EncoderModel

    from ..models import four_bit

    where = four_bit.device()
    four_bit.text_encoder(f"{work}/plain", where).save_pretrained(f"{work}/first")
    model = T5EncoderModel.from_pretrained(f"{work}/first", device_map={"": str(where)})
    model.save_pretrained(f"{work}/second")
    again = T5EncoderModel.from_pretrained(f"{work}/second", device_map={"": str(where)})
    assert torch.equal(four_bit.encode(model, where), four_bit.encode(again, where)), "the output differs"
    return "is saved, and loads again with the same output"
