"""Group offloading keeps what a program writes to the weights between two passes.

After a backward pass with checkpoints, or an exception, groups are still on their device then, and have host copies.
"""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from diffusers_quantfix.offloading import groups
from diffusers_quantfix.offloading.inventory import Inventory
from tests.fixes.callers import interrupt, stopped_at_each_line
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, STREAM, assert_left, modes, net, offload, output, plain
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
from torch.utils.checkpoint import checkpoint  # noqa: E402

# Name -> the test file that makes such models, and how it calls the weights.
QUANTIZED = {
    "4-bit": ("bnb", "4-bit"),
    "8-bit": ("bnb", "8-bit"),
    "quanto": ("quanto", "qint8"),
    "torchao": ("torchao", "int8"),
    "gguf": ("gguf",),
}
kinds = pytest.mark.parametrize("kind", ["plain", *QUANTIZED])
quantized = pytest.mark.parametrize("kind", list(QUANTIZED))
on_disk = pytest.mark.skipif(bool(unmet("diffusers>=0.34")), reason="to disk from diffusers 0.34 on")
blocks = modes("block", "block-stream", long=("block-low", "block-record"))


def counted(bias) -> None:
    bias.detach().mul_(0.5)


def not_counted(bias) -> None:
    """As averages of weights are written, and in effect by fused optimizers."""
    bias.data.mul_(0.5)


writes = pytest.mark.parametrize("write", [counted, not_counted])


def makes(kind: str):
    """Functions that make a model of ``kind`` on a device, and run one on a device without gradients."""
    if kind == "plain":
        return partial(_checkpointed, plain), output
    file, *weights = QUANTIZED[kind]
    made = importlib.import_module(f"tests.fixes.test_diffusers_group_offload_{file}")
    return partial(_checkpointed, partial(made.build, *weights)), made.run


def _checkpointed(build, device):
    model = build(device)

    def forward(x):
        x = model.first(x) * model.scale
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x

    model.forward = forward
    return model


def biases(module):
    return [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]


def assert_stays(gpu, device, kind, mode, change, interrupted) -> None:
    """After ``change(model)`` every run gives what the model gives that was changed in the same way on ``device``.

    Args:
        gpu: the fixture.
        device: where the groups are used.
        kind: of weights.
        mode: options of ``apply_group_offloading``.
        change: changes a model.
        interrupted: for each model, at what part of a pass it is interrupted before; None for never.
    """
    build, run = makes(kind)
    unmoved = build(device)
    first = run(unmoved, device)
    change(unmoved)
    expected = run(unmoved, device)
    assert not torch.equal(first, expected)
    del unmoved
    before = gpu.allocated(device)
    for part in interrupted:
        model = build(device)  # bitsandbytes before 0.46 does not quantize on the CPU
        offload(model, device, mode)
        run(model, device)
        if part is not None:
            interrupt(partial(run, model, device), part)
            torch.cuda.synchronize(device)  # the next group's copies are being made of what is changed now
        change(model)
        for _ in range(3):  # host copies from before would come back with the second
            assert torch.equal(run(model, device), expected), f"interrupted before at {part} of a pass"
            assert_left(gpu, device, before)
        del model


def write_to_biases(write, model) -> None:
    for bias in biases(model):
        write(bias)


@kinds
@writes
@modes("block", "block-stream", long=("leaf-stream", "block-low", "block-record"))
def test_after_an_interrupted_pass(gpu, mode, kind, write):
    change = partial(write_to_biases, write)
    assert_stays(gpu, gpu.devices[0], kind, mode, change, (0.3, 0.5, 0.7))


@on_disk
@writes
@pytest.mark.parametrize("stream", [{}, STREAM], ids=["", "stream"])
def test_of_groups_on_disk_after_an_interrupted_pass(gpu, tmp_path, stream, write):
    mode = BLOCK | stream | {"offload_to_disk_path": str(tmp_path)}
    assert_stays(gpu, gpu.devices[0], "plain", mode, partial(write_to_biases, write), (0.3, 0.5, 0.7))


def load(build, device, model) -> None:
    """Load the state of a model whose layers are in another order into the tensors that ``model`` has."""
    other = build(device)
    other.blocks[0], other.blocks[1] = other.blocks[1], other.blocks[0]
    other.first, other.blocks[0][0] = other.blocks[0][0], other.first
    model.load_state_dict(other.state_dict())


@quantized
@modes("block", "block-stream", long=("leaf", "leaf-stream", "block-low"))
def test_a_state_dict_loaded_after_an_interrupted_pass(gpu, mode, kind):
    device = gpu.devices[0]
    change = partial(load, makes(kind)[0], device)
    assert_stays(gpu, device, kind, mode, change, (0.3, 0.5, 0.7))


@pytest.mark.long
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_state_dict_loaded_between_interrupted_passes(gpu, kind):
    """Also where what was loaded was just being copied back."""
    device = gpu.devices[0]
    build, run = makes(kind)
    unmoved = build(device)
    run(unmoved, device)
    load(build, device, unmoved)
    expected = run(unmoved, device)

    def prepare():
        model = build(device)
        offload(model, device, BLOCK)
        run(model, device)
        interrupt(partial(run, model, device), 0.5)
        load(build, device, model)
        return model

    stops, places = 0, (groups._put_back, groups._put_onto_device, Inventory.exchange)
    for model in stopped_at_each_line(prepare, partial(run, device=device), *places):
        for _ in range(2):
            assert torch.equal(run(model, device), expected), f"after line {stops}"
        stops += 1
    assert stops > 50


def train(write, device, model) -> None:
    """Two steps, each of which ends with ``write(bias)`` for the biases of the blocks, where they are then."""
    bias = model.first.bias
    inputs = torch.randn(3, bias.numel(), generator=torch.Generator().manual_seed(7))
    inputs = inputs.to(device, bias.dtype)
    model.requires_grad_(False)
    for bias in biases(model.blocks):
        bias.requires_grad_(True)
    for _ in range(2):
        model(inputs).float().pow(2).mean().backward()
        for bias in biases(model.blocks):
            assert bias.grad.device == bias.device
            bias.grad = None
            write(bias)


@kinds
@writes
@blocks
def test_training_with_checkpoints(gpu, mode, kind, write):
    device = gpu.devices[0]
    assert_stays(gpu, device, kind, mode, partial(train, write, device), (None,))


@on_disk
@writes
@pytest.mark.parametrize("stream", [{}, STREAM], ids=["", "stream"])
def test_training_with_checkpoints_of_groups_on_disk(gpu, tmp_path, stream, write):
    device, mode = gpu.devices[0], BLOCK | stream | {"offload_to_disk_path": str(tmp_path)}
    assert_stays(gpu, device, "plain", mode, partial(train, write, device), (None,))


class Averaging(torch.nn.Module):
    """Subtracts the average of its inputs in training, which it writes uncounted, as codebooks do."""

    def __init__(self, bias):
        super().__init__()
        self.register_buffer("mean", torch.zeros_like(bias))
        self.register_buffer("begun", torch.zeros_like(bias[:1]))

    def forward(self, x):
        if self.training:
            average = x.detach().reshape(-1, x.shape[-1]).mean(0)
            self.mean.data.copy_(torch.where(self.begun > 0, self.mean.lerp(average, 0.5), average))
            self.begun.data.fill_(1)
        return x - self.mean


@quantized
@blocks
def test_averages_in_training(gpu, mode, kind):
    """Of a layer and of the model itself, also where no gradients are computed."""
    device = gpu.devices[0]
    build, run = makes(kind)

    def averaging():
        model = build(device)
        for block in model.blocks:
            block[1] = Averaging(model.first.bias.detach())
        model.register_buffer("mean", torch.zeros_like(model.first.bias.detach()))
        forward = model.forward

        def averages(x):
            if model.training:
                model.mean.data.lerp_(x.detach().mean(0), 0.5)
            return forward(x - model.mean)

        model.forward = averages
        return model.train()

    def told(model):
        outputs = [run(model, device) for _ in range(3)]
        buffers = [buffer.cpu() for name, buffer in model.named_buffers() if "scale" not in name]
        return [*outputs, *buffers, run(model.eval(), device)]

    expected = told(averaging())
    model = averaging()
    offload(model, device, mode)
    assert all(map(torch.equal, told(model), expected))


@writes
@blocks
def test_bitsandbytes_weights_that_are_trained(gpu, mode, write):
    """``has_fp16_weights``: an Int8Params that is not quantized."""
    bnb = pytest.importorskip("bitsandbytes")
    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"the rig has no stand-in for how they were quantized before 0.46; {sentence}")
    device = gpu.devices[0]

    def linear(seed):
        torch.manual_seed(seed)
        return bnb.nn.Linear8bitLt(128, 128, has_fp16_weights=True)

    def change(model):
        model(torch.ones(2, 128, device=device)).sum().backward()
        for parameter in model.blocks.parameters():
            parameter.grad = None
            write(parameter)

    def run(model):
        with torch.no_grad():
            return model(torch.ones(2, 128, device=device)).cpu()

    unmoved, model = (_checkpointed(lambda device: net(linear).to(device), device) for _ in range(2))
    offload(model, device, mode)
    for _ in range(2):
        change(unmoved)
        change(model)
        for _ in range(2):
            assert torch.equal(run(model), run(unmoved))
