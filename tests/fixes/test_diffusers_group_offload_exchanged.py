"""diffusers-group-offload-exchanged: what comes into a model after its groups were set up."""

from __future__ import annotations

import pytest

from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    BLOCK,
    LEAF,
    STREAM,
    assert_exchanged_is_moved,
    assert_exchanged_is_moved_after_interruptions,
    assert_left,
    modes,
    net,
    offload,
)
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-exchanged"
SHOWS = "KeyError|Parameter containing|tensor"
WIDTH = 64

streams = modes("block-stream", long=("block-low", "block-record"))


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def build(device):
    return net(linear).to(device)


def run(model, device):
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=device)).cpu()


class Scaled(torch.nn.Module):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x):
        return x * self.scale


def layer(model):
    model.blocks[0][0] = linear(11)


def layer_with_a_buffer(model):
    model.blocks[1][1] = Scaled()


def parameter(model):
    model.blocks[1][2].weight = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.01), requires_grad=False)


def layer_on_the_device(model):
    """As an adapter is added: where the layer computes."""
    model.blocks[1][0] = linear(12).to(DEVICE[0])


DEVICE: list = []
EXCHANGES = [layer, layer_with_a_buffer, parameter, layer_on_the_device]


@streams
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_exchanged(gpu, mode, exchange):
    device = gpu.devices[0]
    DEVICE[:] = [device]

    def exchanged(model):
        exchange(model)
        if next(model.parameters()).device.type != "cpu":
            model.to(device)  # the model that is not offloaded

    assert_exchanged_is_moved(gpu, device, build, lambda model: run(model, device), mode, exchanged)


@pytest.mark.parametrize("mode", [LEAF | STREAM, BLOCK | STREAM], ids=["leaf", "block"])
@pytest.mark.parametrize("earlier", [False, True], ids=["at first", "after a pass"])
@pytest.mark.parametrize("swap", [False, True], ids=["exchanged", "swapped"])
def test_a_plain_and_a_torchao_weight_of_two_groups(gpu, mode, earlier, swap):
    """Exchanged, the second pass failed; swapped within their objects, one layer computed with its old weight."""
    torchao = pytest.importorskip("torchao.quantization")
    if sentence := unmet("torchao>=0.15"):
        pytest.skip(sentence)

    def build():
        model = net(linear)
        torchao.quantize_(model.blocks[0], torchao.Int8WeightOnlyConfig(version=2))
        return model

    def change(model):
        one, other = model.blocks[0][0], model.blocks[1][0]
        if swap:
            torch.utils.swap_tensors(one.weight, other.weight)
        else:
            one.weight, other.weight = other.weight, one.weight

    device, model, unmoved = gpu.devices[0], build(), build()
    offload(model, device, mode)
    if earlier:
        run(model, device)
    change(model)
    change(unmoved)
    for _ in range(2):
        if swap:
            with pytest.raises(RuntimeError, match="Int8Tensor was put into a plain parameter"):
                run(model, device)
        else:
            torch.testing.assert_close(run(model, device), run(unmoved, "cpu"))


@streams
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_two_models_swap_layers(gpu, mode):
    """As the two UNets of Versatile Diffusion do it, before each call and after it."""
    device = gpu.devices[0]

    def two():
        return net(linear), net(lambda seed: linear(seed + 20))

    def swap(one, other):
        for a, b in zip(one.blocks, other.blocks, strict=True):
            a[0], b[0] = b[0], a[0]

    def both(one, other):
        outputs = []
        for _ in range(2):
            swap(one, other)
            outputs += [run(one, device), run(other, device)]
        return torch.stack(outputs)

    expected = both(*(model.to(device) for model in two()))
    before = gpu.allocated(device)
    models = two()
    for model in models:
        offload(model, device, mode)

    def right(outputs):
        assert torch.equal(outputs, expected)
        assert_left(gpu, device, before)

    for _ in range(2):
        right(both(*models))


@streams
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_interrupted(gpu, mode):
    device = gpu.devices[0]
    assert_exchanged_is_moved_after_interruptions(
        gpu, device, build, lambda model: run(model, device), mode, layer
    )


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_is_gone_is_forgotten(gpu):
    import weakref

    device = gpu.devices[0]
    model = build("cpu")
    offload(model, device, BLOCK | STREAM)
    run(model, device)
    gone = weakref.ref(model.blocks[0][0].weight)
    layer(model)
    run(model, device)
    assert gone() is None, "KeyError would have been better: its host copy is kept"


def test_another_key_error_is_raised(gpu, side):
    """What a program's own tensors raise is not swallowed."""
    device = gpu.devices[0]
    model = build("cpu")
    offload(model, device, BLOCK | STREAM)
    group = model.blocks[0]._diffusers_hook.get_hook("group_offloading").group
    run(model, device)

    class Raises:
        def __getattr__(self, name):
            raise KeyError("mine")

    group.modules = [Raises()]
    with pytest.raises(KeyError, match="mine"):
        group.onload_()
