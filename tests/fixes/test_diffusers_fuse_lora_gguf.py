"""diffusers-fuse-lora-gguf: fuse_lora of a GGUF model fails in the middle."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.fixes import gguf_models, lora_models
from tests.rig import models

FIX_ID = "diffusers-fuse-lora-gguf"
pytest.importorskip("peft", reason="peft is not installed")
REFUSED = (
    r"a LoRA cannot be merged into GGUF weights \(\d+ layers of this FluxTransformer2DModel\)"
    r".*dequantize_lora_layers\(\)"
)


def pipeline(folder):
    """A pipeline whose GGUF transformer has a LoRA, also for a layer that is not quantized."""
    import torch
    from peft import LoraConfig

    transformer = gguf_models.transformer(folder)
    plain = torch.nn.Linear(64, 64).requires_grad_(False)
    plain.load_state_dict(
        {"weight": torch.eye(64), "bias": transformer.transformer_blocks[0].attn.to_q.bias}, strict=False
    )
    transformer.transformer_blocks[0].attn.to_q = plain
    targets = [name for name, _ in transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    transformer.add_adapter(
        LoraConfig(r=4, target_modules=targets, init_lora_weights=False), adapter_name="one"
    )
    return models.flux_pipeline(transformer)


@pytest.mark.defect(FIX_ID, shows=r"The size of tensor a \(36\) must match the size of tensor b \(64\)")
@pytest.mark.parametrize("whole", [True, False])
def test_it_is_refused_before_anything_is_merged(tmp_path, whole):
    import torch

    pipe = pipeline(tmp_path)
    before = lora_models.run(pipe)
    with pytest.raises(ValueError, match=REFUSED):
        pipe.fuse_lora(components=["transformer"]) if whole else pipe.transformer.fuse_lora()
    assert not any(getattr(layer, "merged", False) for layer in pipe.transformer.modules())
    assert torch.equal(lora_models.run(pipe), before)


def test_the_way_that_the_error_names(tmp_path):
    import torch

    pipe = models.flux_pipeline(gguf_models.transformer(tmp_path))
    without = lora_models.run(pipe)
    lora_models.load(pipe, "one")
    expected = lora_models.run(pipe)
    qf.dequantize_lora_layers(pipe)
    pipe.fuse_lora(components=["transformer"])
    assert lora_models.distance(lora_models.run(pipe), expected) < 1e-4
    pipe.unfuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    assert lora_models.distance(lora_models.run(pipe), without) < 1e-4
    assert not torch.equal(expected, without)


def test_a_gguf_model_whose_lora_is_elsewhere(tmp_path):
    """Only layers that would be merged count."""
    import torch
    from peft import LoraConfig

    transformer = gguf_models.transformer(tmp_path)
    transformer.extra = torch.nn.Linear(64, 64)
    transformer.add_adapter(
        LoraConfig(r=4, target_modules=["extra"], init_lora_weights=False), adapter_name="one"
    )
    transformer.fuse_lora()
    assert transformer.extra.merged
