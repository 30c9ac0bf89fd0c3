"""torchao-load-map: torch.load with a dict of devices leaves weights of torchao on two devices."""

from __future__ import annotations

import pytest

from tests.fixes import mapped
from tests.fixes import torchao_models as ao


@pytest.mark.defect("torchao-load-map", shows=mapped.SHOWS)
@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_the_tensors_of_a_state_dict(rig_devices, weights):
    model = ao.layers(weights, "cuda:0")
    for name, tensor in mapped.reloaded(model.state_dict(), mapped.MAPS["dict"]).items():
        assert str(tensor.device) == "cuda:1", f"{name} reports another device than it is on"


@mapped.each_map
@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_each_map(rig_devices, weights, places):
    mapped.assert_moved(ao.layers(weights, "cuda:0"), places, ao.run)
