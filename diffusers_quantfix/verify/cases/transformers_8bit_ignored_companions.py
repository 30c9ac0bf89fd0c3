"""An 8-bit text encoder that ignores keys matching "layer.0", but has such a layer, is saved and loaded."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch
    from transformers import BertConfig, BertModel, BitsAndBytesConfig

    from ..case import CannotReproduce

    class Encoder(BertModel):
        _keys_to_ignore_on_load_unexpected = [r"layer\.0"]  # noqa: RUF012

    where = cuda()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    Encoder(config).save_pretrained(f"{work}/plain")
    options = {"device_map": {"": 0}, "torch_dtype": torch.float16}
    try:
        model = Encoder.from_pretrained(
            f"{work}/plain", quantization_config=BitsAndBytesConfig(load_in_8bit=True), **options
        )
    except ImportError as refusal:  # transformers requires a newer bitsandbytes
        raise CannotReproduce(f"transformers: {refusal}") from None
    model.save_pretrained(f"{work}/quantized")
    again = Encoder.from_pretrained(f"{work}/quantized", **options)
    saved, loaded = (one.encoder.layer[0].intermediate.dense.weight for one in (model, again))
    assert loaded.dtype == torch.int8, f"the weights of the layer came back as {loaded.dtype}"
    assert torch.equal(saved.data, loaded.data), "the weights of the layer differ"
    return f"loads onto {where}, that layer too"
