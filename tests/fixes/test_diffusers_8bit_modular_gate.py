"""diffusers-8bit-modular-gate: modular pipelines do not move their 8-bit components."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, eight_bit_models

FIX_ID = "diffusers-8bit-modular-gate"
NEEDS = "diffusers>=0.35"
STAYS = "is on cuda:0, not on|bytes stayed on cuda|it warned"


def pipeline(model):
    """A modular pipeline with ``model`` as its transformer, and no blocks that would need more."""
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

    pipe = ModularPipeline.__new__(ModularPipeline)
    vars(pipe).update(
        _component_specs={"transformer": ComponentSpec(name="transformer", type_hint=type(model))},
        transformer=model,
        hf_device_map=None,
    )
    return pipe


@pytest.mark.defect(FIX_ID, shows=STAYS, needs=NEEDS)
@pytest.mark.defect("bnb-linear8bit-move", shows=STAYS, needs=NEEDS)
def test_it_moves_and_says_nothing_false(gpu, tmp_path, side):
    here = gpu.devices[0]
    model = eight_bit_models.transformer(tmp_path, side)
    pipe = pipeline(model)
    said = eight_bit_models.warnings_of(lambda: pipe.to("cpu"))
    assert "8bit and moving it to" not in said, f"it warned: {said}"
    assert "cannot run with `cpu` device" in said
    eight_bit.assert_whole(model, "cpu")
    eight_bit.assert_gone(gpu, here)
    pipe.to(here)
    eight_bit.assert_whole(model, here)
