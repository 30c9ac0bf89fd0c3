"""peft-merge-gguf: merge_adapter and merge_and_unload of a GGUF model fail in the middle."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.fixes import gguf_models, lora_models

FIX_ID = "peft-merge-gguf"
pytest.importorskip("peft", reason="peft is not installed")
REFUSED = (
    r"an adapter cannot be merged into GGUF weights \(\d+ layers of this FluxTransformer2DModel\)"
    r".*dequantize_lora_layers\(\)"
)
VERBS = ("merge_adapter", "merge_and_unload")


def adapted(transformer):
    """The model of peft around it, with a LoRA also for a layer that is not quantized."""
    import torch
    from peft import LoraConfig, get_peft_model

    plain = torch.nn.Linear(64, 64).requires_grad_(False)
    bias = transformer.transformer_blocks[0].attn.to_q.bias
    plain.load_state_dict({"weight": torch.eye(64), "bias": bias}, strict=False)
    transformer.transformer_blocks[0].attn.to_q = plain
    targets = [name for name, _ in transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    torch.manual_seed(1)
    return get_peft_model(transformer, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.defect(FIX_ID, shows=r"The size of tensor a \(36\) must match the size of tensor b \(64\)")
def test_it_is_refused_before_anything_is_merged(tmp_path, verb):
    import torch

    transformer = gguf_models.transformer(tmp_path)
    model = adapted(transformer)
    before = gguf_models.run(transformer)
    with pytest.raises(ValueError, match=REFUSED):
        getattr(model, verb)()
    assert not any(getattr(layer, "merged", False) for layer in model.modules())
    assert torch.equal(gguf_models.run(transformer), before)


@pytest.mark.parametrize("verb", VERBS)
def test_the_way_that_the_error_names(tmp_path, verb):
    transformer = gguf_models.transformer(tmp_path)
    model = adapted(transformer)
    expected = gguf_models.run(transformer)
    qf.dequantize_lora_layers(model)
    getattr(model, verb)()
    assert lora_models.distance(gguf_models.run(transformer), expected) < 1e-4


def test_it_can_be_taken_out(tmp_path):
    import torch

    transformer = gguf_models.transformer(tmp_path)
    model = adapted(transformer)
    with model.disable_adapter():
        expected = gguf_models.run(transformer)
    assert torch.equal(gguf_models.run(model.unload()), expected)
