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
