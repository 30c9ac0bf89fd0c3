"""peft-8bit-empty-lora: ``low_cpu_mem_usage=True``, diffusers' default, with an 8-bit model."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit_models, lora_models
from tests.gate import gate
from tests.rig import models

FIX_ID = "peft-8bit-empty-lora"
SHOWS = "Cannot copy out of meta tensor; no data!"
pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_layers():
    """The LoRA is empty at first, then where the layer is, and the same as one that had memory from the beginning."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils import get_peft_model_state_dict

    bnb = pytest.importorskip("bitsandbytes")
    config = LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=False)

    def adapted(low_cpu_mem_usage):
        layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2)]
        model = torch.nn.Sequential(*layers).requires_grad_(False)
        return inject_adapter_in_model(config, model, low_cpu_mem_usage=low_cpu_mem_usage)

    whole, empty = adapted(False), adapted(True)
    weights = get_peft_model_state_dict(whole)
    base = [layer.base_layer.weight for layer in empty]
    set_peft_model_state_dict(empty, weights, low_cpu_mem_usage=True)
    assert [layer.base_layer.weight for layer in empty] == base
    loaded = get_peft_model_state_dict(empty)
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert not any("to" in vars(layer) for layer in empty)


# peft 0.13 asks 8-bit layers for what bitsandbytes has no more from 0.45 on ("memory_efficient_backward")
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="peft>=0.14")
@pytest.mark.parametrize("placed", ["before", "after"])
def test_a_pipeline(gpu, tmp_path, side, placed):
    """As diffusers' documentation loads a LoRA; the output is that of a LoRA that had memory from the beginning."""
    import torch

    if side == "bare" and not gate(FIX_ID)[0] and gate("diffusers-lora-offload-flip")[0]:
        pytest.skip("without diffusers-lora-offload-flip the 8-bit weights are lost on the way")
    outputs = []
    for low in (False, True):
        pipe = models.flux_pipeline(eight_bit_models.transformer(tmp_path, side))
        if placed == "before":
            pipe.to("cuda")
        pipe.load_lora_weights(lora_models.weights(), adapter_name="one", low_cpu_mem_usage=low)
        pipe.to("cuda")
        outputs.append(lora_models.run(pipe, torch.device("cuda"), torch.float16))
    assert torch.equal(*outputs)
