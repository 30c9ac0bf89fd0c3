"""A 4-bit text encoder is saved in files that split its layers, and loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from transformers import T5EncoderModel

    from ..models import four_bit

    where = four_bit.device()
    model = four_bit.text_encoder(f"{work}/plain", where)
    expected = four_bit.encode(model, where)
    model = four_bit.text_encoder(f"{work}/plain", where)  # not repacked for a CPU kernel
    model.save_pretrained(f"{work}/saved", max_shard_size=4100)
    files = [name for name in os.listdir(f"{work}/saved") if name.endswith(".safetensors")]
    again = T5EncoderModel.from_pretrained(
        f"{work}/saved", device_map={"": str(where)}, torch_dtype=torch.float32
    )
    assert torch.equal(four_bit.encode(again.eval(), where), expected), "the output changed"
    return f"loaded the text encoder from {len(files)} files; output exact"
