"""A model of sdnq, a quantizer of diffusers about which no fix is: the tools know its tensors, and it moves whole."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.rig import models

pytestmark = pytest.mark.skipif(bool(unmet("sdnq") or unmet("diffusers>=0.42")), reason="needs sdnq")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


@pytest.fixture
def pipe(folder):
    import torch
    from diffusers import FluxTransformer2DModel, SDNQConfig

    config = SDNQConfig(weights_dtype="uint4")
    transformer = FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=config, torch_dtype=torch.bfloat16
    )
    return models.flux_pipeline(transformer)


def run(pipe, device):
    import torch

    return models.call_flux(pipe, device=device, dtype=torch.bfloat16).cpu()


def test_the_audit_counts_it_and_it_moves(rig_devices, pipe):
    import torch

    import diffusers_quantfix as qf

    here, there = rig_devices.devices
    size = sum(one.nbytes for one in (*pipe.transformer.parameters(), *pipe.transformer.buffers()))
    reference = run(pipe.to(here), here)
    assert rig_devices.allocated(here) >= size
    qf.audit(pipe).raise_if_misplaced()
    count = sum(1 for _ in pipe.transformer.parameters()) + 2  # of the scheduler
    assert f"{count} tensors" in str(qf.audit(pipe))
    assert torch.equal(run(pipe.to(there), there), reference)
    pipe.to("cpu")
    assert rig_devices.allocated(here) < size / 100, "bytes left"


@pytest.mark.parametrize("offload", ["model", "sequential", "leaf", "leaf with a stream", "block"])
def test_offload_is_exact_and_leaves_nothing(rig_devices, pipe, offload):
    import torch

    here = rig_devices.devices[0]
    reference = run(pipe.to(here), here)
    pipe.to("cpu")
    before = rig_devices.allocated(here)
    if offload in ("model", "sequential"):
        getattr(pipe, f"enable_{offload}_cpu_offload")(device="cuda")
    else:
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cuda"),
            offload_type="block_level" if offload == "block" else "leaf_level",
            use_stream="stream" in offload,
            **({"num_blocks_per_group": 1} if offload == "block" else {}),
        )
    for _ in range(2):
        assert torch.equal(run(pipe, here), reference)
    if offload == "model":
        pipe.maybe_free_model_hooks()
    assert rig_devices.allocated(here) - before < 1024, "bytes left"
