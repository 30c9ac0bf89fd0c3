"""diffusers-4bit-load-scan: loading a 4-bit checkpoint is linear in its layers."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit

FIX_ID = "diffusers-4bit-load-scan"


class Counting(dict):
    """A state dict that counts how many of its keys it was asked for, one after the other."""

    seen = 0

    def items(self):
        for pair in super().items():
            Counting.seen += 1
            yield pair

    def __iter__(self):
        for key in super().__iter__():
            Counting.seen += 1
            yield key


def restore(names, checkpoint, device, unexpected=None):
    """Layers with the weights ``names`` of ``checkpoint``, by the quantizer of diffusers."""
    import torch
    from diffusers import BitsAndBytesConfig
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    quantizer = BnB4BitDiffusersQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=True)
    model = torch.nn.ModuleList(four_bit.linear(device, seed=9, bias=False) for _ in names)
    for name in names:
        quantizer.create_quantized_param(model, checkpoint[name], name, device, checkpoint, unexpected)
    return model


def state(layers) -> dict:
    return {name: tensor.cpu() for name, tensor in layers.state_dict().items()}


def layers(device, count: int):
    import torch

    return torch.nn.ModuleList(four_bit.linear(device, seed=i, bias=False) for i in range(count))


def assert_same(ours, theirs, device):
    import torch

    x = four_bit.batch(device)
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one(x), other(x))


@pytest.mark.defect(FIX_ID, shows=r"16 layers looked at \d+ keys")
def test_each_key_is_looked_at_a_few_times(gpu):
    device = gpu.devices[0]
    source = layers(device, 16)
    checkpoint = Counting(state(source))
    names = [f"{i}.weight" for i in range(16)]
    unexpected = [name for name in checkpoint if not name.endswith("weight")]
    Counting.seen = 0
    model = restore(names, checkpoint, device, unexpected)
    seen = Counting.seen
    assert not unexpected
    assert_same(model, source, device)
    assert seen <= 4 * len(checkpoint), f"16 layers looked at {seen} keys of {len(checkpoint)}"


def test_another_shard_is_another_list(gpu):
    """Shards of the same size, each of which may lie where the last one lay; names of which one begins with another."""
    device = gpu.devices[0]
    source = layers(device, 12)
    whole = state(source)
    for i in range(12):
        shard = {"0" + key[len(str(i)) :]: value for key, value in whole.items() if key.startswith(f"{i}.")}
        assert_same(restore(["0.weight"], shard, device), source[i : i + 1], device)
        del shard
    assert_same(restore([f"{i}.weight" for i in range(12)], whole, device), source, device)
