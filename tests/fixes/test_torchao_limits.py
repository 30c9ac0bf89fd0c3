"""What torchao itself cannot do with its weights: an error, and never a wrong result.

None of it is about the devices: ``meta`` shows the same as a GPU.
"""

from __future__ import annotations

import pytest

from tests.fixes import torchao_models as ao
from tests.gate import unmet

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(bool(unmet("torchao>=0.18")), reason="the errors of the newest torchao")


@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_disk_offload(weights, tmp_path):
    """The refusal comes before a weight is moved."""
    from accelerate import disk_offload

    model = ao.layers(weights)
    expected = ao.run(model)
    with pytest.raises(
        NotImplementedError, match="Tensor dispatch: attempting to run unimplemented operator"
    ):
        disk_offload(model, tmp_path, torch.device("cpu"))
    assert torch.equal(ao.run(model), expected)


@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_moved_in_inference_mode(weights):
    """Hence no model offload in inference mode; group offload works there, and a run is all right on one device."""
    model = ao.layers(weights)
    expected = ao.run(model)
    with torch.inference_mode():
        assert torch.equal(ao.run(model), expected)
        with pytest.raises(RuntimeError, match="Attempted to set the storage of a tensor on device"):
            model.to("meta")
    assert torch.equal(ao.run(model), expected)


@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_sequential_offload_in_inference_mode(weights):
    from accelerate import cpu_offload

    model = ao.layers(weights)
    expected = ao.run(model)
    cpu_offload(model, torch.device("cpu"))
    with (
        torch.inference_mode(),
        pytest.raises(NotImplementedError, match="Tensor dispatch: attempting to run unimplemented operator"),
    ):
        ao.run(model)
    assert torch.equal(ao.run(model), expected)
