"""Modules under group offloading for tests: the ways to offload, and what has to hold for each."""

from __future__ import annotations

import inspect
import time

import pytest

from tests.fixes.callers import assert_goes_on, interrupt, spelled
from tests.gate import unmet

FEATURES = 128

LEAF = {"offload_type": "leaf_level"}
BLOCK = {"offload_type": "block_level", "num_blocks_per_group": 1}
STREAM = {"use_stream": True}
LOW = {"use_stream": True, "low_cpu_mem_usage": True}
RECORD = {"use_stream": True, "record_stream": True}
MODES = {
    "leaf": LEAF,
    "block": BLOCK,
    "leaf-stream": LEAF | STREAM,
    "block-stream": BLOCK | STREAM,
    "leaf-low": LEAF | LOW,
    "block-low": BLOCK | LOW,
    "leaf-record": LEAF | RECORD,
    "block-record": BLOCK | RECORD,
}
SHOWS = (
    r"same device|same GPU|different from other tensors on|bytes stayed|cannot pin|is_pinned|"
    r"invalid python storage|set the storage of a tensor on device"
)


def modes(*names, long=()):
    """Parametrize ``mode`` with these of ``MODES``, all of them without names; the devices are late with a stream.

    Those of ``long`` are run with the long tests. Without names, one kind of groups without a stream and the other with
    one run with every test; the rest is long.
    """
    late = pytest.mark.late(needs="diffusers>=0.42")
    now = names or ("block", "leaf-stream")
    names = (*names, *long)
    marks = {
        name: [late] * ("use_stream" in mode) + [pytest.mark.long] * (name not in now)
        for name, mode in MODES.items()
    }
    return pytest.mark.parametrize(
        "mode", [pytest.param(MODES[name], id=name, marks=marks[name]) for name in names or MODES]
    )


def net(linear, blocks: int = 2):
    """A model of ``blocks`` blocks with two layers each, made by ``linear(seed)``, a layer in front and a loose
    parameter."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = [linear(seed) for seed in range(2 * blocks + 1)]
            self.first = layers.pop()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=self.first.bias.dtype), requires_grad=False)
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(layers[2 * i], torch.nn.GELU(), layers[2 * i + 1]) for i in range(blocks)
            )

        def forward(self, x):
            x = self.first(x) * self.scale
            for block in self.blocks:
                x = x + block(x)
            return x

    return Net().eval()


def plain(device):
    """`net` of layers that are not quantized, on ``device``."""
    import torch

    def linear(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(64, 64)

    return net(linear).to(device)


def output(model, device):
    """What a model of `plain` gives on ``device``, on the CPU."""
    import torch

    with torch.no_grad():
        return model(torch.ones(2, 64, device=device)).cpu()


def skippable(model):
    """A model of `net` that leaves out the blocks whose numbers are in ``model.skipped``."""
    model.skipped = ()

    def forward(x):
        x = model.first(x) * model.scale
        for i, block in enumerate(model.blocks):
            x = x if i in model.skipped else x + block(x)
        return x

    model.forward = forward
    return model


def offload(model, device, mode):
    """``apply_group_offloading`` to ``device``; skips where this diffusers has no such option."""
    import torch
    from diffusers.hooks import apply_group_offloading

    missing = mode.keys() - inspect.signature(apply_group_offloading).parameters.keys()
    if missing:
        pytest.skip(f"apply_group_offloading has no {', '.join(sorted(missing))} here")
    onload_device = spelled(device)
    if isinstance(onload_device, str) and (sentence := unmet("diffusers>=0.35")):
        pytest.skip(f"group offloading took no text for a device before; {sentence}")
    apply_group_offloading(model, onload_device=onload_device, offload_device=torch.device("cpu"), **mode)


def stop(model) -> None:
    """Take the hooks off, as diffusers does it."""
    from diffusers.hooks import HookRegistry

    registry = HookRegistry.check_if_exists_or_initialize(model)
    for name in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
        registry.remove_hook(name, recurse=True)


def assert_works(gpu, device, build, run, mode) -> None:
    """A model that ``build()`` makes on ``device`` gives the same offloaded as it gives there, and leaves nothing.

    Args:
        gpu: the fixture.
        device: where the groups are used.
        build: makes the model.
        run: gives the output of a model on the CPU.
        mode: options of ``apply_group_offloading``.
    """
    import torch

    expected = run(build())
    before = gpu.allocated(device)
    model = build()
    offload(model, device, mode)
    assert_left(gpu, device, before)
    for _ in range(3):  # on a stream, the second pass is the first with everything fetched ahead
        assert torch.equal(run(model), expected)
        assert_left(gpu, device, before)
    for part in (0.3, 0.6, 0.9):
        interrupt(lambda: run(model), part)
        for _ in range(2):
            assert torch.equal(run(model), expected), f"after an interruption at {part} of a pass"
            assert_left(gpu, device, before)


def assert_allowed(gpu, mode, build, run) -> None:
    """A model whose class refused group offload gives the same in it as on the device, also after interrupted passes,
    and leaves nothing there.

    Args:
        gpu: the fixture.
        mode: options of ``enable_group_offload``.
        build: makes the model.
        run: gives the output of a model for inputs on a device, on the CPU.
    """
    import torch

    device = gpu.devices[0]
    model = build()
    expected = run(model.to(device) if model.device != device else model, device)
    del model
    before = gpu.allocated(device)
    model = build()
    if model.device.type != "cpu":
        model.to("cpu")
    model.enable_group_offload(onload_device=spelled(device), **mode)

    def same(output):
        assert torch.equal(output, expected)

    for _ in range(2):
        same(run(model, device))
    assert_goes_on(lambda: run(model, device), same)
    same(run(model, device))
    assert gpu.allocated(device) <= before, "bytes stayed on the device"


def assert_works_in_every_mode(gpu, device, build, run, mode, made_in_inference_mode=False) -> None:
    """The same when `torch.inference_mode` comes and goes between the passes, and ``run`` computes no gradients."""
    import torch

    expected = run(build())
    before = gpu.allocated(device)
    with torch.inference_mode(made_in_inference_mode):
        model = build()
        offload(model, device, mode)
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            output = run(model)
        assert torch.equal(output, expected), f"in inference mode: {inference}"
        assert_left(gpu, device, before)


def assert_gives_gradients(gpu, device, build, inputs, mode) -> None:
    """The gradient that reaches the input is that of a model that stays on ``device``, and the next run leaves nothing.

    Args:
        gpu: the fixture.
        device: where the groups are used.
        build: makes a model of `net` on ``device``.
        inputs: on ``device``, without a gradient.
        mode: options of ``apply_group_offloading``.
    """
    import torch

    def gradient(model, interrupted=False):
        given = inputs.detach().requires_grad_(True)
        output = model(given).float().pow(2).sum()
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                given.register_hook(stop_here)
                output.backward()
            return None
        output.backward()
        return given.grad.cpu()

    def stop_here(gradient):
        raise KeyboardInterrupt

    expected = gradient(build())
    assert expected.abs().max() > 0
    before = gpu.allocated(device)
    model = build()
    offload(model, device, mode)
    for interrupted in (False, True, False, False):
        found = gradient(model, interrupted)
        assert interrupted or torch.equal(found, expected)
        if not interrupted:  # torch keeps the rest of a graph until its next backward pass
            assert_left(gpu, device, before)
    with torch.no_grad():
        model(inputs)
    assert torch.equal(gradient(model), expected)
    assert_left(gpu, device, before)


def assert_exchanged_is_moved(gpu, device, build, run, mode, exchange) -> None:
    """What ``exchange(model)`` changes between two passes is what the next passes compute with, and leaves nothing.

    Args:
        gpu: the fixture.
        device: where the groups are used.
        build: makes the model on the CPU or the device that it is given.
        run: gives the output of a model on the CPU.
        mode: options of ``apply_group_offloading``.
        exchange: changes a model, which is where it is between two passes.
    """
    import torch

    unmoved = build(device)
    first = run(unmoved)
    exchange(unmoved)
    second = run(unmoved)
    assert not torch.equal(first, second)
    del unmoved
    before = gpu.allocated(device)
    model = build("cpu")
    offload(model, device, mode)
    for _ in range(2):
        assert torch.equal(run(model), first)
    exchange(model)
    for _ in range(2):
        assert torch.equal(run(model), second)
        assert_left(gpu, device, before)


def assert_exchanged_is_moved_after_interruptions(gpu, device, build, run, mode, exchange) -> None:
    """The same if the first pass after the change, and others, end in the middle."""
    import torch

    unmoved = build(device)
    run(unmoved)
    exchange(unmoved)
    expected = run(unmoved.to(device))
    del unmoved
    before = gpu.allocated(device)
    model = build("cpu")
    offload(model, device, mode)
    run(model)
    exchange(model)

    def right(output):
        assert torch.equal(output, expected)
        assert_left(gpu, device, before)

    assert_goes_on(lambda: run(model), right, (0.1, 0.3, 0.5, 0.7, 0.9))


def assert_can_be_moved(pair, model, run, mode, places) -> None:
    """Once its hooks are removed, an offloaded model can be moved to each device of ``pair``, and computes the same.

    Args:
        pair: two devices; the model is on the first one.
        model: the model.
        run: gives its output on a device, on the CPU.
        mode: options of ``apply_group_offloading``.
        places: the devices of a model's tensors, as strings.
    """
    import torch

    first, second = pair
    expected = run(model, first)
    parameters = list(model.parameters())
    offload(model, first, mode)
    run(model, first)
    stop(model)
    assert places(model) == {"cpu"}
    for device in (second, first):
        model.to(device)
        assert places(model) == {str(device)}
        assert torch.equal(run(model, device), expected)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in parameters)


def assert_left(gpu, device, before: int) -> None:
    """Not a byte more than ``before`` is on ``device``."""
    for _ in range(100):  # autograd frees a graph in a thread of its own
        left = gpu.allocated(device) - before
        if left <= 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"{left} bytes stayed on {device}")
