"""``.cuda()`` of an 8-bit T5 encoder."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from transformers import BitsAndBytesConfig, T5Config, T5EncoderModel

    from ..case import CannotReproduce
    from ..models import eight_bit

    where = eight_bit.cuda_device()
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(work)
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
