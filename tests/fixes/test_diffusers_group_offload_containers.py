"""diffusers-group-offload-containers: LoKr and LoHa cannot run under leaf-level group offloading."""

from __future__ import annotations

import pytest

from tests.fixes import lycoris_models
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_works, modes

pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")


leaf = modes("leaf", "leaf-stream", "leaf-low", "leaf-record")


def check(gpu, kind, mode):
    device = gpu.devices[0]

    def run(model):
        return lycoris_models.run(model, device)

    assert_works(gpu, device, lambda: lycoris_models.build(kind, device), run, mode)


@leaf
@pytest.mark.defect(
    "diffusers-group-offload-containers", shows="on the same device|different from other tensors"
)
@pytest.mark.parametrize("kind", lycoris_models.KINDS)
def test_the_factors_come_with_their_layer(gpu, kind, mode):
    check(gpu, kind, mode)


@leaf
def test_on_4bit_layers(gpu, mode):
    check(gpu, lycoris_models.QUANTIZED, mode)
