"""diffusers-own-model-offload: AudioLDM 2 and MusicLDM under model offload."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import LEAF, offload
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

SHOWS = r"bytes stayed on the device|unexpected keyword argument 'device'"


TARGETS = (
    ("AudioLDM2Pipeline", "diffusers-audioldm2-model-offload", "diffusers"),
    ("MusicLDMPipeline", "diffusers-musicldm-model-offload", "diffusers>=0.38"),
    ("MusicLDMPipeline", "diffusers-musicldm-model-offload-old", "diffusers<0.38"),
)


def each_pipeline(shows):
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    pytest.mark.defect(target, shows=shows),
                    pytest.mark.skipif(bool(unmet(release)), reason=f"the module's place with {release}"),
                ],
                id=target,
            )
            for name, target, release in TARGETS
        ],
    )


def own(name):
    from diffusers_quantfix.verify.models import own_offload

    return own_offload.pipeline(name)


def run(pipe):
    from diffusers_quantfix.verify.models import own_offload

    return own_offload.run(pipe).cpu()


@each_pipeline(SHOWS)
def test_nothing_stays(gpu, name):
    device = gpu.devices[0]
    expected = run(own(name).to(device))
    before = gpu.allocated(device)
    pipe = own(name)
    pipe.enable_model_cpu_offload(device=spelled(device))

    def check(output):
        assert torch.equal(output, expected)
        left = gpu.allocated(device) - before
        assert not left, f"{left} bytes stayed on the device"

    for _ in range(2):
        check(run(pipe))
    assert_goes_on(lambda: run(pipe), check)
    pipe.enable_model_cpu_offload(device=spelled(device))
    check(run(pipe))
    assert type(pipe.unet._hf_hook).__name__ == "CpuOffload", "a second set of hooks"
    pipe.remove_all_hooks()
    assert not hasattr(pipe.text_encoder.text_model, "_hf_hook")
    assert torch.equal(run(pipe.to(device)), expected)


@each_pipeline(SHOWS)
def test_another_device(gpu, name):
    device = gpu.devices[-1]
    pipe = own(name)
    pipe.enable_model_cpu_offload(gpu_id=device.index)
    for _ in range(2):
        assert run(pipe).shape
        assert torch.empty(0, device=pipe._execution_device).device == device
        assert sum(gpu.allocated(one) for one in gpu.devices) == 0, "bytes stayed on the device"


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="no such refusal before")
@each_pipeline("DID NOT RAISE|unexpected keyword argument")
def test_refused_under_group_offload(gpu, name):
    device = gpu.devices[0]
    pipe = own(name)
    offload(pipe.unet, device, LEAF)
    with pytest.raises(ValueError, match="group offload"):
        pipe.enable_model_cpu_offload(device=device)
    parts = [part for part in pipe.components.values() if part is not None]
    assert not any(hasattr(module, "_hf_hook") for part in parts for module in part.modules())
    with pytest.raises(ValueError, match="gpu_id"):
        own(name).enable_model_cpu_offload(gpu_id=0, device="cuda:0")
