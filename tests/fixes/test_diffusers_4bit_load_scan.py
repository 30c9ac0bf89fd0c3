"""diffusers-4bit-load-scan: loading a 4-bit checkpoint is linear in its layers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

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


class CountingList(list):
    """A list of keys that counts how many of them it goes through for each question."""

    seen = 0

    def __contains__(self, key):
        CountingList.seen += len(self)
        return super().__contains__(key)

    def remove(self, key):
        CountingList.seen += len(self)
        super().remove(key)


def restore(names, checkpoint, device, unexpected=None, count=None):
    """As many layers as names, or ``count``, with the weights ``names``, by the quantizer of diffusers."""
    import torch
    from diffusers import BitsAndBytesConfig
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    quantizer = BnB4BitDiffusersQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=True)
    model = torch.nn.ModuleList(
        four_bit.linear(device, seed=9, bias=False) for _ in range(count or len(names))
    )
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
    strangers = ["", "0", "3.weight", "3.weightless", "30.weight.absmax", "z"]
    unexpected = CountingList([*strangers, *(name for name in checkpoint if not name.endswith("weight"))])
    random.Random(0).shuffle(unexpected)
    Counting.seen = CountingList.seen = 0
    model = restore(names, checkpoint, device, unexpected)
    seen = Counting.seen + CountingList.seen
    assert sorted(unexpected) == sorted(strangers)
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


def test_shards_that_are_loaded_at_once(gpu):
    """They share the list of unexpected keys, which need not have all of them."""
    device = gpu.devices[0]
    source = layers(device, 24)
    whole = state(source)
    unexpected = [name for name in whole if not name.endswith("weight") and not name.startswith("7.")]
    unexpected.append("a stranger")
    random.Random(0).shuffle(unexpected)
    parts = [[f"{i}.weight" for i in range(first, 24, 4)] for first in range(4)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(restore, part, dict(whole), device, unexpected, 24) for part in parts]
        models = [job.result() for job in jobs]
    assert unexpected == ["a stranger"]
    for first, model in enumerate(models):
        assert_same(model[first::4], source[first::4], device)
