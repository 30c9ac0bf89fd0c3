"""bnb-cpu-packing-sharded: a 4-bit layer that FSDP shards computes noise from its second run on.

One process is enough: FSDP gathers and frees the bytes of a weight there as it does among many.  On a CPU without
AVX512-BF16 the gate says healthy, and the bodies pass on both sides.
"""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, packing
from tests.gate import unmet

FIX_ID = "bnb-cpu-packing-sharded"
SHOWS = "the output changed|a view of a leaf Variable that requires grad|Only support uint8 qweight"

pytestmark = pytest.mark.skipif(
    bool(unmet("bitsandbytes>=0.47") or unmet("torch>=2.8")),
    reason="the CPU reads 4-bit weights packed in floats from bitsandbytes 0.47 on; torch shards there from 2.8 on",
)
kinds = pytest.mark.parametrize(
    ("storage", "double_quant"),
    [("float32", False), ("bfloat16", True), ("float16", False)],
)


@pytest.fixture
def shard():
    """Shards each 4-bit layer of a model, and then the model, over a group of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def apply(model):
        for layer in four_bit.layers_of(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    yield apply
    dist.destroy_process_group()


def stack(storage: str, double_quant: bool):
    """Two frozen 4-bit layers with a LayerNorm that learns between them."""
    import torch

    model = four_bit.stack("cpu", double_quant=double_quant, quant_storage=getattr(torch, storage))
    for layer in four_bit.layers_of(model):
        layer.requires_grad_(False)
    return model


def trained(model) -> list:
    """The gradients of one step of training."""
    model.train()
    model(four_bit.batch("cpu")).pow(2).mean().backward()
    found = [one.grad for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


@kinds
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_each_run_is_as_the_first(shard, storage, double_quant):
    import torch

    reference = four_bit.run(
        stack(storage, double_quant).train(), "cpu"
    )  # in training upstream repacks nothing
    model = shard(stack(storage, double_quant))
    for _ in range(3):
        off = (four_bit.run(model.eval(), "cpu") - reference).norm() / reference.norm()
        assert off < 0.02, f"the output changed: relative error {off:.2g}"
        assert torch.equal(four_bit.run(model.train(), "cpu"), reference), "the output changed"


@kinds
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_training_after_evaluation(shard, storage, double_quant):
    import torch

    expected = trained(stack(storage, double_quant))
    model = shard(stack(storage, double_quant))
    for _ in range(2):
        with torch.no_grad():
            model.eval()(four_bit.batch("cpu"))
        found = trained(model)
        assert len(found) == len(expected) == 2
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (
            "the output changed"
        )


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_run_that_is_interrupted(shard):
    import torch

    model = shard(stack("float32", False))
    reference = four_bit.run(model.train(), "cpu")
    interrupt = model[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model.eval()(four_bit.batch("cpu"))
    interrupt.remove()
    assert torch.equal(four_bit.run(model.train(), "cpu"), reference), "the output changed"


def test_other_layers_are_repacked_as_before(shard, side):
    packing.needs_the_kernel()
    if side == "bare" and unmet("bitsandbytes>=0.50"):
        pytest.skip("bnb-cpu-packing")
    layer = four_bit.linear("cpu")
    four_bit.run(shard(stack("float32", False)), "cpu")
    four_bit.run(layer, "cpu")
    assert layer.weight.quant_state.packing_format_for_cpu
