"""What ``left`` counts, and what it lets stay."""

from __future__ import annotations

import pytest

from tests.pipelines.left import left
from tests.rig import models

torch = pytest.importorskip("torch")


@pytest.fixture
def pipe(rig_devices):
    pipe = models.flux_pipeline()
    pipe.enable_sequential_cpu_offload(device=torch.device("cuda:0"))
    models.call_flux(pipe, device=torch.device("cuda:0"), dtype=torch.float32)
    return pipe


def test_nothing_is_left(pipe):
    assert left(pipe, set(), buffers=True) == 0


def test_a_weight_that_stays_is_counted(pipe):
    weight = pipe.transformer.proj_out._parameters["weight"] = torch.nn.Parameter(
        torch.ones(64, 64, device="cuda:0")
    )
    assert left(pipe, set(), buffers=True) == weight.nbytes


def test_a_weight_kept_beside_its_layer_is_counted(pipe):
    copy = pipe.transformer.proj_out.copy = torch.ones(64, 64, device="cuda:0")
    assert left(pipe, set(), buffers=True) == copy.nbytes


def test_a_cache_of_the_model_may_stay(pipe):
    pipe.transformer.table = [torch.ones(64, device="cuda:0")]
    pipe.scheduler.table = torch.ones(64, device="cuda:0")
    assert left(pipe, set(), buffers=True) == 0


def test_a_component_that_is_to_stay_may(pipe):
    pipe.transformer.proj_out._parameters["weight"] = torch.nn.Parameter(torch.ones(64, 64, device="cuda:0"))
    assert left(pipe, {"transformer"}, buffers=True) == 0
