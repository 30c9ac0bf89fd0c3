"""A T5 encoder is loaded from the 4-bit checkpoint of a whole T5."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from transformers import BitsAndBytesConfig, T5EncoderModel, T5ForConditionalGeneration

    from ..models import four_bit, t5

    where = four_bit.device()
    torch.manual_seed(0)
    T5ForConditionalGeneration(t5.config()).save_pretrained(f"{work}/plain")
    quantized = T5ForConditionalGeneration.from_pretrained(
        f"{work}/plain",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        device_map={"": str(where)},
    ).eval()
    expected = four_bit.encode(quantized.encoder, where)
    quantized.save_pretrained(f"{work}/quantized")
    encoder = T5EncoderModel.from_pretrained(f"{work}/quantized", device_map={"": str(where)}).eval()
    off = (four_bit.encode(encoder, where) - expected).abs().max().item()
    assert off == 0, f"maximum error of the embeddings: {off:.2g}"
    return "loads, and gives the embeddings of the whole model"
