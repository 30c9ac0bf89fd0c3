"""diffusers-fuse-model-lora-offloaded: fusing a LoRA into an offloaded model has no effect."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models
from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import without_index as without_index
from tests.fixes.offloaded import offload
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-fuse-model-lora-offloaded"


@pytest.mark.defect(FIX_ID, shows=r"the (fused|disabled|unfused) model is off by")
def test_fused_lora_has_its_effect():
    pipe, expected = (lora_models.load(models.flux_pipeline()) for _ in range(2))
    offload(pipe.transformer)
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


@pytest.mark.usefixtures("without_index")
def test_without_an_index_interrupted_and_in_inference_mode(gpu):
    device = gpu.devices[0]
    pipe, expected = (lora_models.load(models.flux_pipeline()) for _ in range(2))
    expected.transformer.to(device)
    offload(pipe.transformer, device=device)
    for verb in ("fuse", "unfuse"):
        for one in (pipe, expected):
            getattr(one.transformer, f"{verb}_lora")()
        reference = lora_models.run(expected, device)

        def check(latents, reference=reference):
            assert lora_models.distance(latents, reference) < 1e-5

        assert_goes_on(lambda: lora_models.run(pipe, device), check)


def _switch(model, verb):
    """Both names of it; one wants to have loaded the adapters itself before 0.33."""
    getattr(model, f"{verb}_adapters" if model._hf_peft_config_loaded else f"{verb}_lora")()
