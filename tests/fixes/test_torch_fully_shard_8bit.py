"""torch-fully-shard-8bit: ``fully_shard`` destroys an 8-bit model."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")
if unmet("torch>=2.6"):
    pytest.skip("fully_shard is elsewhere before torch 2.6", allow_module_level=True)

FIX_ID = "torch-fully-shard-8bit"
SHOWS = eight_bit.SHARD_SHOWS


@pytest.fixture
def shard():
    """``fully_shard`` of a model over a group of this process alone."""
    from torch.distributed.fsdp import fully_shard

    with eight_bit.sharded_by(fully_shard) as shard:
        yield shard


def stack():
    model = eight_bit.stack("cpu")
    for layer in eight_bit.layers_of(model):
        layer.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_refused_before_anything_is_changed(shard, as_list):
    model = stack()
    expected, parameters = eight_bit.run(model, "cpu"), eight_bit.parameters_of(model)
    with pytest.raises(ValueError, match=r"8-bit weights of bitsandbytes \(2 in what is to be sharded\)"):
        shard([model] if as_list else model)
        eight_bit.run(model, "cpu")
    assert eight_bit.parameters_of(model) == parameters
    assert torch.equal(eight_bit.run(model, "cpu"), expected)


def test_the_way_that_the_error_names(shard):
    if unmet("torch>=2.8"):
        pytest.skip("fully_shard runs on the CPU from torch 2.8 on")
    model = stack()
    expected = eight_bit.run(model, "cpu")
    whole = {layer.weight for layer in eight_bit.layers_of(model)}
    sharded = shard(model, ignored_params=whole)
    assert sharded is model and type(model[1].weight).__name__ == "DTensor"
    for _ in range(2):
        assert torch.equal(eight_bit.run(model, "cpu"), expected)
    eight_bit.assert_whole(model, "cpu")


def test_other_models_are_sharded(shard):
    if unmet("torch>=2.8"):
        pytest.skip("fully_shard runs on the CPU from torch 2.8 on")
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    inputs = torch.ones(1, 8)
    expected = model(inputs)
    shard(list(model))
    assert torch.equal(shard(model)(inputs), expected)
    assert fully_shard.state(model) is not None
