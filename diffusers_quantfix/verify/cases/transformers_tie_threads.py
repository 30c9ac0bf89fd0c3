"""A T5 encoder is loaded while another thread makes a model, and after two threads have made models at once."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from transformers import T5Config, T5EncoderModel
    from transformers.initialization import no_tie_weights
    from transformers.modeling_utils import PreTrainedModel

    from ..models.threads import kept, overlapping

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(work)

    def device() -> str:
        return str(T5EncoderModel.from_pretrained(work).encoder.embed_tokens.weight.device)

    with kept((PreTrainedModel, "tie_weights"), (torch, "linspace")):
        meanwhile = overlapping(no_tie_weights, device)
        afterwards = device()
    assert meanwhile == afterwards == "cpu", (
        f"the shared weight is on {meanwhile}, afterwards on {afterwards}"
    )
    return "the encoder shares its weight, meanwhile and afterwards"
