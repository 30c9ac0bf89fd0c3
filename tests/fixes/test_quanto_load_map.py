"""quanto-load-map: torch.load with a dict of devices leaves weights of quanto on two devices."""

from __future__ import annotations

import pytest

from tests.fixes import mapped
from tests.fixes import quanto_models as q


def run(model, device):
    import torch

    with torch.no_grad():
        return model(q.inputs().to(device)).cpu()


@pytest.mark.defect("quanto-load-map", shows=mapped.SHOWS)
@pytest.mark.parametrize("qtype", q.QTYPES)
def test_a_dict(rig_devices, qtype):
    mapped.assert_moved(q.layers(qtype).to("cuda:0"), mapped.MAPS["dict"], run)


@mapped.each_map
def test_each_map(rig_devices, places):
    mapped.assert_moved(q.layers("qint8").to("cuda:0"), places, run)


def test_a_function_is_refused_by_torch(rig_devices):
    with pytest.raises(RuntimeError, match="Callable map_location not supported"):
        mapped.reloaded(q.layers("qint8"), lambda storage, location: storage)
