"""diffusers-attend-excite-graph: what Attend-and-Excite leaves on the device."""

from __future__ import annotations

import gc

import pytest

from diffusers_quantfix.verify.models.unet import unet as tiny_unet
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

SHOWS = r"bytes stayed on the device"
each_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target,
            marks=[
                pytest.mark.defect(target, shows=SHOWS),
                pytest.mark.skipif(bool(unmet(release)), reason=f"the module's place with {release}"),
            ],
        )
        for target, release in (
            ("diffusers-attend-excite-store", "diffusers>=0.38"),
            ("diffusers-attend-excite-store-old", "diffusers<0.38"),
        )
    ],
)


def pipeline():
    from diffusers import DDIMScheduler, StableDiffusionAttendAndExcitePipeline

    pipe = StableDiffusionAttendAndExcitePipeline(
        vae=models.vae(latent_channels=4),
        text_encoder=models.clip_text(),
        tokenizer=models.tokenizer(),
        unet=tiny_unet(),
        scheduler=DDIMScheduler(),
        feature_extractor=None,
        safety_checker=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe):
    return pipe(
        "w1 w2",
        token_indices=[1],
        attn_res=(4, 4),
        num_inference_steps=2,
        max_iter_to_alter=1,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images.cpu()


@pytest.mark.long
@pytest.mark.parametrize("placement", ["stay", "model", "sequential"])
@each_target
def test_nothing_but_weights_stays(gpu, placement, target):
    device = gpu.devices[0]
    expected = run(pipeline().to(device))
    gc.collect()
    before = gpu.allocated(device)
    pipe = pipeline()
    if placement == "stay":
        pipe.to(device)
        before = gpu.allocated(device)
    elif placement == "model":
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.enable_sequential_cpu_offload(device=device)
        before = gpu.allocated(device)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
        pipe.maybe_free_model_hooks()
        kept = pipe.attention_store.get_average_attention()
        maps = sum(one.untyped_storage().nbytes() for each in kept.values() for one in each)
        assert maps, "the maps can still be looked at"
        left = gpu.allocated(device) - before - maps
        assert left <= 4096, f"{left} bytes stayed on the device"


def test_the_loss_has_its_graph(gpu):
    with torch.no_grad():
        pipe = pipeline()
        expected = run(pipe)
        pipe._update_latent = lambda latents, loss, step_size: latents
        assert not torch.equal(run(pipe), expected), "the gradient has no effect"
