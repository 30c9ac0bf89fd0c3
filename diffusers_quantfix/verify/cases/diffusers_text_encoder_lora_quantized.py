"""A LoRA is loaded into a 4-bit CLIP text encoder."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from transformers import BitsAndBytesConfig, CLIPTextConfig, CLIPTextModel

    from ..models import four_bit, lora

    where = four_bit.device()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "projection_dim": 64, "vocab_size": 64}
    CLIPTextModel(CLIPTextConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)).save_pretrained(work)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    encoder = CLIPTextModel.from_pretrained(
        work, quantization_config=config, device_map={"": str(where)}, torch_dtype=torch.float32
    ).eval()
    pipe = lora.pipeline(text_encoder=encoder)
    before = _encode(encoder, where)
    weights = lora.weights(encoder, "text_encoder", ("q_proj", "v_proj"))
    pipe.load_lora_weights(weights, adapter_name="lora")
    change = (_encode(encoder, where) - before).abs().max().item()
    assert change > 1e-4, f"the LoRA changes the embeddings by {change}"
    return f"loaded the LoRA ({len(weights)} matrices); it changes the embeddings by up to {change:.2g}"


def _encode(encoder: Any, where: Any) -> Any:
    import torch

    with torch.no_grad():
        return encoder(torch.tensor([[2, 5, 6, 3]], device=where)).last_hidden_state.cpu()
