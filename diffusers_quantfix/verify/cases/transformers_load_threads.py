"""Two threads load a transformers model in float16 at once."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    from ..models.threads import kept, overlapping_calls

    config = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
    CLIPTextModel(config).save_pretrained(work)

    def load(middle):
        class Model(CLIPTextModel):
            def __init__(self, config):
                middle()
                super().__init__(config)

        Model.from_pretrained(work, torch_dtype=torch.float16)

    with kept((torch.nn.Module, "register_parameter")):
        before = torch.get_default_dtype()
        overlapping_calls(load)
        after = torch.get_default_dtype()
    assert after == before, f"the default dtype is {after}"
    return f"the default dtype is {after} again"
