"""A single file is loaded while another thread makes a model in bfloat16."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from diffusers import LTXVideoTransformer3DModel

    from ..models.threads import kept, while_a_model_is_made

    LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=8,
    ).save_pretrained(work)

    def load(is_made: Any) -> Any:
        class Model(LTXVideoTransformer3DModel):
            @classmethod
            def from_config(cls, *args: Any, **kwargs: Any) -> Any:
                made = super().from_config(*args, **kwargs)
                is_made()
                return made

        return Model.from_single_file(f"{work}/diffusion_pytorch_model.safetensors", config=work)

    with kept():
        model = while_a_model_is_made(f"{work}/text_encoder", load)
    dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
    assert dtypes == [str(torch.float32)], f"the model is in {', '.join(dtypes)}"
    return "the model is in float32, as alone"
