"""torch-composable-fully-shard-8bit: the ``fully_shard`` of torch before 2.6 destroys an 8-bit model."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

FIX_ID = "torch-composable-fully-shard-8bit"
SHOWS = eight_bit.SHARD_SHOWS


@pytest.fixture
def shard():
    """``fully_shard`` by its older spelling, over a group of this process alone."""
    fsdp = pytest.importorskip("torch.distributed._composable.fsdp")
    with eight_bit.sharded_by(lambda *args, **options: fsdp.fully_shard(*args, **options)) as shard:
        yield shard


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.defect("torch-fully-shard-8bit", shows=SHOWS)
def test_it_is_refused_before_anything_is_changed(shard, as_list):
    """Either this fix or, from torch 2.6 on, where it is the same function, that of the newer spelling."""
    if as_list and unmet("torch>=2.5"):
        pytest.skip("fully_shard takes a list from torch 2.5 on")
    model = eight_bit.stack("cpu")
    for layer in eight_bit.layers_of(model):
        layer.weight.requires_grad_(False)
    expected, parameters = eight_bit.run(model, "cpu"), eight_bit.parameters_of(model)
    with pytest.raises(
        ValueError, match=r"8-bit weights of bitsandbytes \(2 in what is to be sharded\)"
    ) as refusal:
        shard([model] if as_list else model)
        eight_bit.run(model, "cpu")
    assert eight_bit.parameters_of(model) == parameters
    assert torch.equal(eight_bit.run(model, "cpu"), expected)
    if unmet("torch>=2.6"):
        assert "ignored_params" not in str(refusal.value)  # these releases have no such argument


def test_an_imported_copy_is_patched_too(shard):
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._composable.fsdp.fully_shard import fully_shard as written

    for one in (fully_shard, written):
        with pytest.raises(ValueError, match="8-bit weights of bitsandbytes"):
            one(eight_bit.stack("cpu"))


def test_the_state_of_the_contract_is_still_there(shard):
    """``contract`` puts a function ``state`` on what it decorates."""
    from torch.distributed._composable.fsdp import fully_shard

    assert callable(fully_shard.state)
