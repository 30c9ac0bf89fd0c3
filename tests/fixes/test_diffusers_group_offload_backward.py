"""diffusers-group-offload-backward: gradients through a model under group offload whose layers save their weights."""

from __future__ import annotations

import gc

import pytest

from tests.fixes.group_offloaded import assert_gives_gradients, assert_left, modes, offload
from tests.gate import unmet

FIX_ID = "diffusers-group-offload-backward"
SHOWS = r"on the same device|different device|should be the same"

torch = pytest.importorskip("torch")
if unmet("torch>=2.8"):
    pytest.skip(
        "before 2.8 torch does not tell whether there are hooks of saved tensors", allow_module_level=True
    )
pytest.importorskip("diffusers")
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")
FEATURES = 32


def build(device="cpu"):
    """Blocks of layers that save their weights for the backward pass: a norm, a convolution, a multiplication."""

    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(FEATURES)
            self.conv = torch.nn.Conv1d(FEATURES, FEATURES, 1)
            self.linear = torch.nn.Linear(FEATURES, FEATURES)
            torch.nn.init.normal_(self.norm.weight)

        def forward(self, x):
            return x + self.linear(self.conv(self.norm(x).unsqueeze(-1)).squeeze(-1))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.LayerNorm(FEATURES)
            self.blocks = torch.nn.ModuleList([Block(), Block()])
            self.checkpoints = False

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            return x

    torch.manual_seed(0)
    return Net().to(device)


def inputs(device):
    return torch.linspace(-1, 1, 2 * FEATURES, device=device).reshape(2, FEATURES).sin().requires_grad_()


@modes()
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_gradient_of_the_input(gpu, mode, frozen):
    device = gpu.devices[0]

    def model():
        return build(device).requires_grad_(not frozen)

    if frozen:
        assert_gives_gradients(gpu, device, model, inputs(device), mode)
        return
    x = inputs(device)
    expected = torch.autograd.grad(model()(x).square().sum(), [x])[0]
    offloaded = model()
    offload(offloaded, device, mode)
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(offloaded(x).square().sum(), [x])[0], expected)


@modes("leaf", "block-stream")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_two_graphs_and_second_derivatives(gpu, mode):
    device = gpu.devices[0]

    def twice(model):
        first, second = inputs(device), inputs(device)
        outputs = model(first), model(second * 2)
        gradients = [
            torch.autograd.grad(output.square().sum(), [x], create_graph=True)[0]
            for output, x in zip(outputs, (first, second), strict=True)
        ]
        more = torch.autograd.grad(sum(one.square().sum() for one in gradients), [first, second])
        return [one.detach() for one in (*gradients, *more)]

    expected = twice(build(device))
    model = build(device)
    offload(model, device, mode)
    for _ in range(2):
        for one, other in zip(twice(model), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_nothing_is_kept_when_the_graph_is_gone(gpu):
    device = gpu.devices[0]
    gc.collect()  # what earlier tests left
    before = gpu.allocated(device)
    model = build(device)
    offload(model, device, {"offload_type": "leaf_level"})
    gc.collect()
    gc.disable()
    try:
        x = inputs(device)
        for _ in range(2):
            torch.autograd.grad(model(x).sum(), [x])
        del x
        assert_left(gpu, device, before)
    finally:
        gc.enable()


def test_a_change_in_place_is_an_error_as_without_offload(gpu):
    device = gpu.devices[0]
    model = build(device)
    offload(model, device, {"offload_type": "leaf_level"})
    x = inputs(device)
    between = x * 1
    output = model(between)
    between.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@modes("leaf", "block", "leaf-stream", "block-stream")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.defect(FIX_ID, shows=SHOWS + "|different metadata")
def test_gradient_checkpointing_computes_again(gpu, mode, frozen):
    device = gpu.devices[0]
    calls = []
    expected = torch.autograd.grad(build(device)(x := inputs(device)).square().sum(), [x])[0]
    model = build(device).requires_grad_(not frozen)
    model.checkpoints = True
    offload(model, device, mode)
    model.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        calls.clear()
        assert torch.equal(torch.autograd.grad(model(x).square().sum(), [x])[0], expected)
        assert len(calls) == 2, "the block was not computed again"


@modes("leaf")
def test_hooks_of_the_caller_and_none_allowed(gpu, mode):
    device = gpu.devices[0]
    x = inputs(device)
    expected = torch.autograd.grad(build(device)(x).square().sum(), [x])[0]
    model = build(device)
    offload(model, device, mode)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):  # as torch.func does
        model(x)
    seen = []

    def keep(tensor):
        seen.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    assert seen
    assert torch.equal(torch.autograd.grad(output.square().sum(), [x])[0], expected)
