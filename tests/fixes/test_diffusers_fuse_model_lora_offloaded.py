"""diffusers-fuse-model-lora-offloaded: fusing a LoRA into an offloaded model has no effect."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-fuse-model-lora-offloaded"


@pytest.mark.defect(FIX_ID, shows=r"the (fused|disabled|unfused) model is off by")
def test_fused_lora_has_its_effect():
    import torch
    from accelerate import cpu_offload

    pipe, expected = (lora_models.load(models.flux_pipeline()) for _ in range(2))
    cpu_offload(pipe.transformer, torch.device("cpu"))
    for said, act in (
        ("fused", lambda model: model.fuse_lora()),
        ("disabled", lambda model: _switch(model, "disable")),
        ("enabled", lambda model: _switch(model, "enable")),
        ("fused", lambda model: model.fuse_lora()),
        ("unfused", lambda model: model.unfuse_lora()),
        ("disabled", lambda model: model.disable_lora()),
    ):
        for one in (pipe, expected):
            act(one.transformer)
        off = lora_models.distance(lora_models.run(pipe), lora_models.run(expected))
        assert off < 1e-5, f"the {said} model is off by {off}"


def _switch(model, verb):
    """Both names of it; one wants to have loaded the adapters itself before 0.33."""
    getattr(model, f"{verb}_adapters" if model._hf_peft_config_loaded else f"{verb}_lora")()
