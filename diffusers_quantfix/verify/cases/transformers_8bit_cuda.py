"""``.cuda()`` of an 8-bit T5 encoder."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch
    from transformers import BitsAndBytesConfig, T5EncoderModel

    from ..case import CannotReproduce
    from ..models import t5

    where = cuda()
    t5.encoder().save_pretrained(work)
    try:
        model = T5EncoderModel.from_pretrained(
            work,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            device_map={"": 0},
            torch_dtype=torch.float16,
        )
    except ImportError as refusal:  # transformers requires a newer bitsandbytes
        raise CannotReproduce(f"transformers: {refusal}") from None
    model.cuda()
    return f".cuda() moves an 8-bit text encoder to {where}"
