"""diffusers-control-lora-reset: a layer that a Control LoRA had widened comes back on another device."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-control-lora-reset"
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.32.2")), reason="no reset of Control LoRAs before 0.32.2"
)
SHOWS = r"same device|is on |no hook"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_pipeline_moved_since_the_lora_came(gpu):
    here = gpu.devices[0]
    pipe = with_control()
    pipe.to(here)
    reset(pipe, here)


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_model_offload_while_the_model_is_on_the_device(gpu):
    """As after a run that was interrupted: accelerate takes such a model for complete."""
    here = gpu.devices[0]
    pipe = with_control()
    pipe.enable_model_cpu_offload(device=spelled(here))
    pipe.transformer.to(here)
    reset(pipe, here)


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_sequential_offload(gpu):
    here = gpu.devices[0]
    pipe = with_control()
    pipe.enable_sequential_cpu_offload(device=spelled(here))
    reset(pipe, here)
    assert all(parameter.is_meta for parameter in pipe.transformer.parameters())


@pytest.mark.usefixtures("each_spelling")
def test_control_lora_that_comes_under_offload(gpu):
    here = gpu.devices[0]
    for offload in ("enable_sequential_cpu_offload", "enable_model_cpu_offload"):
        pipe = pipeline()
        getattr(pipe, offload)(device=spelled(here))
        control(pipe)
        assert pipe.transformer.x_embedder.in_features == 128
        reset(pipe, here)


def reset(pipe, here):
    """Without the LoRA the pipeline is what it was before."""
    pipe.unload_lora_weights(reset_to_overwritten_params=True)
    assert pipe.transformer.x_embedder.in_features == 64
    places = {str(parameter.device) for parameter in pipe.transformer.parameters()}
    assert len(places) == 1, f"the model is on {' and '.join(sorted(places))}"
    reference = lora_models.run(pipeline())

    def check(latents):
        assert lora_models.distance(latents, reference) < 1e-5

    check(lora_models.run(pipe, here))
    # Early: at its end model offload moves all back with the hooks off.
    assert_goes_on(lambda: lora_models.run(pipe, here), check, (0.3, 0.5))


def with_control():
    return control(pipeline())


def pipeline():
    return models.flux_pipeline()


def control(pipe):
    """Load a LoRA that widens ``x_embedder`` from 64 to 128 features."""
    import torch

    generator = torch.Generator().manual_seed(5)
    lora = lora_models.weights()
    lora["transformer.x_embedder.lora_A.weight"] = torch.randn(4, 128, generator=generator)
    lora["transformer.x_embedder.lora_B.weight"] = torch.randn(64, 4, generator=generator)
    pipe.load_lora_weights(lora, adapter_name="control")
    return pipe
