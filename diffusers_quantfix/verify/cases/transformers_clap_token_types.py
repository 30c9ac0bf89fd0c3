"""The text model of CLAP is offloaded sequentially, with its buffers."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from transformers import ClapTextConfig, ClapTextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ClapTextModel(ClapTextConfig(vocab_size=16, **sizes)).eval()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids).pooler_output
        model = cpu_offload(model, torch.device("cpu"), offload_buffers=True)
        errors = [(model(ids).pooler_output - expected).abs().max().item() for _ in range(2)]
    assert errors == [0, 0], f"errors in two runs: {errors}"
    return "exact in two runs of the offloaded model"
