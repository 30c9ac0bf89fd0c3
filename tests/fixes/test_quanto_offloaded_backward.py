"""quanto-offloaded-backward: the backward pass of quanto does not find a weight that group offloading took back."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import FEATURES, LEAF, assert_gives_gradients, modes, net, offload
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
quanto = quanto_models.quanto()

FIX_ID = "quanto-offloaded-backward"
SHOWS = r"same device|different from other tensors on"

weights = pytest.mark.parametrize("weights", ["qint8", "qint4", "qint2", "qfloat8"])


def build(weights: str, device):
    def linear(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(FEATURES, FEATURES)

    model = net(linear)
    quanto.quantize(model, weights=getattr(quanto, weights))
    quanto.freeze(model)
    return model.to(device).requires_grad_(False)


def check(gpu, weights, mode):
    device = gpu.devices[-1]
    inputs = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(0)).to(device)
    assert_gives_gradients(gpu, device, lambda: build(weights, device), inputs, mode)


@pytest.mark.defect("quanto-offloaded-backward", shows=SHOWS)
@weights
@modes("leaf", "block")
def test_the_gradient_of_the_input(gpu, weights, mode):
    check(gpu, weights, mode)


@weights
@modes()
def test_in_every_mode(gpu, weights, mode):
    """On a stream upstream leaves all weights on the device where they were: it has no error then."""
    check(gpu, weights, mode)


def test_the_gradient_of_a_weight_that_was_taken_back(gpu):
    """quanto's weights keep ``requires_grad``; it arrives where the layer computed."""
    device = gpu.devices[0]
    found = []
    for offloaded in (False, True):
        model = build("qint8", device)
        model.first.weight.requires_grad_(True)
        if offloaded:
            offload(model, device, LEAF)
        model(torch.ones(3, FEATURES, device=device)).sum().backward()
        found.append(model.first.weight.grad)
    assert found[0].device == found[1].device == device
    assert torch.equal(found[0], found[1])


def test_two_threads(gpu):
    """Each with its own graph over one model that is on the CPU by then."""
    import threading

    if sentence := unmet("optimum-quanto>=0.2.6"):
        pytest.skip(sentence)
    device, results = gpu.devices[0], {}
    reference = build("qint8", device)
    model = build("qint8", device)
    offload(model, device, LEAF)

    def gradient(of, seed):
        given = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(seed))
        return given.to(device).requires_grad_(True)

    given = {seed: gradient(model, seed) for seed in range(2)}
    outputs = {seed: model(one).sum() for seed, one in given.items()}
    threads = [threading.Thread(target=one.backward) for one in outputs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, one in given.items():
        expected = gradient(reference, seed)
        reference(expected).sum().backward()
        results[seed] = torch.equal(one.grad, expected.grad)
    assert results == {0: True, 1: True}
