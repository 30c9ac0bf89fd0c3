"""diffusers-cache-disabled-offloaded: disable_cache of an offloaded model removes its offloading."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("accelerate")
if unmet("diffusers>=0.33"):
    pytest.skip("FasterCache came with diffusers 0.33.0", allow_module_level=True)

FIX_ID = "diffusers-cache-disabled-offloaded"
SHOWS = "on the same (device|GPU)|Expected a cuda device"  # the second: bitsandbytes before 0.44


def config():
    """FasterCache, which has a hook for the whole model; none of these timesteps is skipped."""
    from diffusers import FasterCacheConfig

    return FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1),
        current_timestep_callback=lambda: 500,
        attention_weight_callback=lambda _: 0.3,
        is_guidance_distilled=True,
        tensor_format="BCHW",
    )


DEFECT = pytest.mark.defect(FIX_ID, shows=SHOWS)


@pytest.mark.parametrize("first", [pytest.param("cache", marks=DEFECT), "offload"])
@pytest.mark.parametrize("kind", ["plain", "4-bit"])
def test_it_runs_and_is_taken_back(gpu, tmp_path, kind, first):
    import torch

    here = gpu.devices[0]
    transformer = models.flux_transformer().half()
    if kind == "4-bit":
        transformer.save_pretrained(tmp_path)
        transformer = four_bit.load(type(transformer), tmp_path)
    pipe = models.flux_pipeline(transformer)
    expected = models.call_flux(pipe.to(here), device=here, dtype=torch.float16).cpu()
    pipe.to("cpu")
    if first == "cache":
        transformer.enable_cache(config())
    pipe.enable_model_cpu_offload(device=here)
    if first == "offload":
        transformer.enable_cache(config())
    transformer.disable_cache()
    for _ in range(2):
        assert torch.equal(models.call_flux(pipe, device=here, dtype=torch.float16).cpu(), expected)
    pipe.maybe_free_model_hooks()
    assert {one.device.type for one in transformer.parameters()} == {"cpu"}
    pipe.remove_all_hooks()
    assert torch.equal(models.call_flux(pipe.to(here), device=here, dtype=torch.float16).cpu(), expected)
