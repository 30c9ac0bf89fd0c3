"""diffusers-sequential-guard: pipe.to("cuda") on a sequentially offloaded pipeline with quantized components."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import spelled
from tests.fixes.callers import spelling as spelling
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-sequential-guard"
CLEAR = "you have activated sequential model offloading"
SHOWS = r"Cannot copy out of meta tensor|meta"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_offloaded_quantized_pipeline_is_not_moved(gpu, saved):
    pipe = pipeline(saved)
    pipe.enable_sequential_cpu_offload(device=spelled(gpu.devices[0]))
    with pytest.raises(ValueError, match=CLEAR):
        pipe.to("cuda")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_nor_one_whose_other_component_is_offloaded(gpu, saved):
    """The quantized component is not offloaded."""
    from accelerate import cpu_offload

    pipe = pipeline(saved, text_encoder=models.clip_text())
    cpu_offload(pipe.text_encoder, spelled(gpu.devices[0]))
    for ask in (lambda: pipe.to("cuda"), lambda: pipe.to(device=gpu.devices[0])):
        with pytest.raises(ValueError, match=CLEAR):
            ask()


def test_what_is_not_offloaded_moves(gpu, saved):
    """Hooks that only align inputs are no offload."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    here = gpu.devices[0]
    pipe = pipeline(saved)
    add_hook_to_module(pipe.transformer, AlignDevicesHook(execution_device=here, io_same_device=True))
    pipe.to("cpu", silence_dtype_warnings=True)
    if unmet("diffusers>=0.32"):
        return  # there every such hook counts
    pipe.to(here)
    four_bit.assert_whole(pipe.transformer, here)


def pipeline(folder, **components):
    from diffusers import FluxTransformer2DModel

    return models.flux_pipeline(four_bit.load(FluxTransformer2DModel, folder), **components)
