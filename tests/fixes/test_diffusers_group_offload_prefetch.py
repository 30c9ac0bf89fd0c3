"""diffusers-group-offload-prefetch: group offloading on a stream computes with weights that are still being copied."""

from __future__ import annotations

import threading

import pytest

from tests import rig
from tests.fixes import eight_bit, four_bit
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    BLOCK,
    LEAF,
    LOW,
    RECORD,
    STREAM,
    assert_left,
    net,
    offload,
    skippable,
    stop,
)
from tests.gate import unmet
from tests.rig.fixtures import require_rig

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
pytestmark = pytest.mark.late(needs="diffusers>=0.33", shows_bare=True)

FIX_ID = "diffusers-group-offload-prefetch"
# A late rig says who did not wait, if the output or the weights do not say it before.
SHOWS = r"who did not wait|not the (weights|output)"

MODES = {
    "leaf": LEAF | STREAM,
    "block": BLOCK | STREAM,
    "leaf-low": LEAF | LOW,
    "block-record": BLOCK | RECORD,
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
quantized = pytest.mark.parametrize("kind", ["4-bit", "8-bit"])
kinds = pytest.mark.parametrize("kind", ["plain", "4-bit", "8-bit"])


def linear(kind: str, device, seed: int):
    if kind != "plain":
        pytest.importorskip("bitsandbytes")
        if sentence := unmet("bitsandbytes>=0.46"):
            pytest.skip(f"what native kernels write is not known to late devices; {sentence}")
    if kind == "4-bit":
        return four_bit.linear(device, seed=seed)
    if kind == "8-bit":
        return eight_bit.linear(device, seed=seed)
    torch.manual_seed(seed)
    return torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES)


def build(kind: str, device, blocks: int = 3):
    """A chain of blocks; the forward pass of block ``model.stops_at`` raises."""
    model = net(lambda seed: linear(kind, device, seed), blocks)
    model.stops_at = None

    def check(module, args):
        if model.stops_at is not None and module is model.blocks[model.stops_at][1]:
            raise Stopped

    for block in model.blocks:
        block[1].register_forward_pre_hook(check)
    return model.to(device)


class Stopped(Exception):
    """As a lack of memory, or Ctrl-C."""


def run(model, device):
    layer = model.first
    inputs = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(inputs.to(layer.bias.dtype).to(device)).cpu()


def assert_output(model, device, expected) -> None:
    assert torch.equal(run(model, device), expected), "not the output"


def stopped(model, device, at):
    """A pass that ends with an exception in the block ``at``."""
    model.stops_at = at
    with pytest.raises(Stopped):
        run(model, device)
    model.stops_at = None


@modes
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pass_that_was_stopped(gpu, mode):
    stop_in_the_middle(gpu, "plain", mode)


@modes
@quantized
def test_a_pass_of_a_quantized_model_that_was_stopped(gpu, kind, mode):
    stop_in_the_middle(gpu, kind, mode)


def stop_in_the_middle(gpu, kind, mode) -> None:
    """The weights are read after it, and the model is offloaded anew, as loading a LoRA does it."""
    device = gpu.devices[0]
    model = build(kind, device)
    expected = run(model, device)
    weights = {name: tensor.cpu() for name, tensor in four_bit.state_of(model).items()}
    before = gpu.allocated(device)
    offload(model, device, mode)
    for _ in range(2):
        assert_output(model, device, expected)
    for at in range(len(model.blocks)):
        stopped(model, device, at)
        assert_weights(model, weights)
        stop(model)
        if unmet("diffusers>=0.35"):  # which does not offload a model for the second time
            for module in model.modules():
                vars(module).pop("_diffusers_hook", None)
        offload(model, device, mode)
        assert_weights(model, weights)
        for _ in range(3):
            assert_output(model, device, expected)
    if gpu.kind == "rig":
        assert_left(gpu, device, before)


def assert_weights(model, expected) -> None:
    now = four_bit.state_of(model)
    wrong = [name for name, tensor in expected.items() if not torch.equal(now[name].cpu(), tensor)]
    assert not wrong, f"not the weights: {wrong}"


@modes
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_weights_that_are_changed_after_a_stopped_pass(gpu, mode):
    """Of the layers that had not run, also of the next one, which was prefetched."""
    device = gpu.devices[0]
    model, twin = build("plain", device), build("plain", device)
    offload(model, device, mode)
    for _ in range(2):
        run(model, device)
    for at in range(len(model.blocks) - 1):
        stopped(model, device, at)
        torch.cuda.synchronize()
        for one in (model, twin):
            layers = [layer for block in one.blocks[at + 1 :] for layer in block]
            if mode["offload_type"] == "leaf_level":
                layers.append(one.blocks[at][2])
            for layer in layers:
                for parameter in layer.parameters():
                    parameter.data.mul_(1.5)
        for _ in range(2):
            assert_output(model, device, run(twin, device))


@modes
@kinds
def test_a_weight_that_is_changed_while_it_is_copied(kind, mode):
    """The program should have waited, and the devices say so; but what was copied meanwhile is never used."""
    require_rig()
    with rig.devices(late=True):
        device = torch.device("cuda", 0)
        model, twin = build(kind, device), build(kind, device)
        offload(model, device, mode)
        for _ in range(2):
            run(model, device)
        for at in range(len(model.blocks) - 1):
            stopped(model, device, at)
            for one in (model, twin):
                following = one.blocks[at][2] if "leaf_level" in mode.values() else one.blocks[at + 1][0]
                following.bias.data.mul_(1.5)
            for _ in range(2):
                assert_output(model, device, run(twin, device))
        assert {hazard.kind for hazard in rig.hazards()} <= {"changed source"}


@modes
@kinds
@pytest.mark.parametrize("counted", [False, True], ids=["data", "counted"])
@pytest.mark.parametrize("where", ["its own hook", "the layer before"])
def test_a_weight_that_is_changed_just_before_its_layer_runs(kind, mode, where, counted):
    """As weights that depend on the step are. The copies that were made before that are never used."""
    require_rig()
    if where == "the layer before" and not counted:
        pytest.skip("torch counts no writes to .data, and nothing else tells of them")

    def with_hook(model):
        model.step = 0
        at_leaf = "leaf_level" in mode.values()
        hooked = model.blocks[1][2] if at_leaf else model.blocks[1]
        changed = hooked if at_leaf else hooked[0]
        if where == "the layer before":
            hooked = model.blocks[1][1] if at_leaf else model.blocks[0][1]

        def write(module, args):
            bias = changed.bias.data if not counted else changed.bias
            with torch.no_grad():
                bias.fill_(model.step)

        hooked.register_forward_pre_hook(write)
        return model

    with rig.devices(late=True):
        device = torch.device("cuda", 0)
        model, twin = (with_hook(build(kind, device)) for _ in range(2))
        offload(model, device, mode)
        for step in range(4):
            model.step = twin.step = step
            assert_output(model, device, run(twin, device))
        # The program should have waited.
        assert {hazard.kind for hazard in rig.hazards()} <= {"changed source"}


@pytest.mark.parametrize("mode", [BLOCK | STREAM, BLOCK | RECORD], ids=["block", "block-record"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.36")
def test_a_model_that_is_a_list_of_blocks(gpu, mode):
    run_a_list_of_blocks(gpu, "plain", mode)


@modes
@kinds
def test_every_model_that_is_a_list_of_blocks(gpu, kind, mode):
    run_a_list_of_blocks(gpu, kind, mode)


def run_a_list_of_blocks(gpu, kind, mode) -> None:
    """MultiControlNetModel is one: it has nothing else, so at block level no hook traces its layers."""
    device = gpu.devices[0]

    class Several(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = [torch.nn.Sequential(linear(kind, device, seed), torch.nn.GELU()) for seed in range(3)]
            self.nets = torch.nn.ModuleList(layers)

        @property
        def first(self):
            return self.nets[0][0]

        def forward(self, x):
            return sum(net(x) for net in self.nets)

    model = Several().to(device)
    expected = run(model, device)
    offload(model, device, mode)
    for _ in range(3):
        assert_output(model, device, expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("mode", [LEAF | STREAM, LEAF | RECORD], ids=["leaf", "leaf-record"])
def test_a_parameter_that_the_model_uses_first(gpu, mode):
    device = gpu.devices[0]
    model = build("plain", device)
    net = model.forward
    model.forward = lambda x: net(x * model.scale)
    model.scale.data.fill_(3)
    expected = run(model, device)
    offload(model, device, mode)
    for _ in range(3):
        assert_output(model, device, expected)


in_a_thread = pytest.mark.parametrize("threads", [False, True], ids=["here", "thread"])


@modes
@in_a_thread
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_another_device_is_current(gpu, mode, threads):
    """Set up where the device is current, used where it is not, as in a new thread."""
    use_elsewhere(gpu, "plain", mode, threads)


@modes
@in_a_thread
@quantized
def test_another_device_is_current_for_a_quantized_model(gpu, kind, mode, threads):
    use_elsewhere(gpu, kind, mode, threads)


def use_elsewhere(gpu, kind, mode, threads) -> None:
    from diffusers.hooks import apply_group_offloading

    first, second = gpu.two
    expected = run(build(kind, second), second)
    torch.cuda.set_device(second)
    model = build(kind, second).to("cpu")
    apply_group_offloading(model, second, torch.device("cpu"), **mode)
    outputs = []

    def passes():
        torch.cuda.set_device(first)
        outputs.extend(run(model, second) for _ in range(3))

    if threads:
        thread = threading.Thread(target=passes)
        thread.start()
        thread.join()
    else:
        passes()
    torch.cuda.set_device(first)
    assert len(outputs) == 3 and all(torch.equal(output, expected) for output in outputs), "not the output"


@modes
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers<0.35")
def test_the_last_layer(gpu, mode):
    """Before diffusers 0.35 nobody waits for it."""
    run_three_times(gpu, "plain", mode)


@modes
@kinds
def test_the_last_layer_of_every_model(gpu, kind, mode):
    run_three_times(gpu, kind, mode)


def run_three_times(gpu, kind, mode) -> None:
    device = gpu.devices[0]
    model = build(kind, device)
    expected = run(model, device)
    before = gpu.allocated(device)
    offload(model, device, mode)
    for _ in range(3):
        assert_output(model, device, expected)
        if gpu.kind == "rig":
            assert_left(gpu, device, before)


@kinds
@modes
def test_transfers_overlap(rig_devices, kind, mode):
    """What is prefetched is copied while the device can compute, and only that."""
    device = rig_devices.devices[0]
    model = build(kind, device)
    offload(model, device, mode)
    for _ in range(2):
        run(model, device)
    rig_devices.reset()
    run(model, device)
    rest = model.first.weight.nbytes if "block_level" in mode.values() else 0
    assert rig_devices.overlapping(device) >= rig_devices.traffic(device).h2d - 2 * rest - 2000


@kinds
@modes
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_a_layer_that_is_skipped(gpu, kind, mode, gradients):
    """What was fetched for it is not taken for its weights."""
    device = gpu.devices[0]
    model = build(kind, device, blocks=4).requires_grad_(False)
    weights = {name: tensor.cpu() for name, tensor in four_bit.state_of(model).items()}
    skippable(model)
    before = gpu.allocated(device)
    layer = model.first
    inputs = torch.ones(2, layer.in_features, device=device, dtype=layer.bias.dtype)

    def outputs(skipped):
        model.skipped = skipped
        with torch.set_grad_enabled(gradients):
            return model(inputs).cpu()

    cases = ((), (1,), (1, 2), (), (3,))
    expected = [outputs(skipped) for skipped in cases]
    offload(model, device, mode)
    for skipped, output in zip(cases, expected, strict=True):
        assert torch.equal(outputs(skipped), output), "not the output"
        if gpu.kind == "rig":
            assert_left(gpu, device, before)
    stop(model)
    assert_weights(model, weights)


@modes
@kinds
def test_a_layer_that_runs_again_while_it_is_used(gpu, kind, mode):
    """A block with a parameter of its own, around layers, twice: it is prefetched for the second time in the first."""
    device = gpu.devices[0]

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleList(linear(kind, device, seed) for seed in range(2))
            self.scale = torch.nn.Parameter(torch.full((), 0.5, dtype=self.inner[0].bias.dtype))

        def forward(self, x):
            for layer in self.inner:
                x = layer(x) * self.scale
            return x

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear(kind, device, 3)
            self.blocks = torch.nn.ModuleList([Outer()])

        def forward(self, x):
            for _ in range(2):
                x = self.blocks[0](self.first(x))
            return x

    model = Twice().to(device)
    expected = run(model, device)
    offload(model, device, mode)
    for _ in range(3):
        assert_output(model, device, expected)


# Before, the backward pass fails: nobody brings the blocks in its order.
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.37")
@pytest.mark.parametrize("mode", [BLOCK | STREAM, BLOCK | LOW], ids=["block", "block-low"])
def test_training_with_checkpoints(gpu, mode):
    train(gpu, "plain", mode)


@quantized
@pytest.mark.parametrize("mode", [BLOCK | STREAM, BLOCK | LOW], ids=["block", "block-low"])
def test_training_of_a_quantized_model_with_checkpoints(gpu, kind, mode):
    train(gpu, kind, mode)


def train(gpu, kind, mode) -> None:
    """The input gets its gradient through frozen blocks, which autograd keeps until it has read them."""
    from torch.utils.checkpoint import checkpoint

    device = gpu.devices[0]
    model = build(kind, device).requires_grad_(False).train()
    layer = model.first

    def forward(x):
        x = model.first(x)
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x

    model.forward = forward

    def gradient():
        inputs = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(7))
        inputs = inputs.to(layer.bias.dtype).to(device).requires_grad_(True)
        model(inputs).float().pow(2).sum().backward()
        return inputs.grad.cpu()

    expected = gradient()
    offload(model, device, mode)
    for _ in range(3):
        assert torch.equal(gradient(), expected), "not the output"
