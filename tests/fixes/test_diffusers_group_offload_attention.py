"""diffusers-group-offload-attention: torch's MultiheadAttention under leaf-level group offloading."""

from __future__ import annotations

import pytest

from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, LEAF, LOW, STREAM, assert_works, modes, offload, stop
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

FIX_ID = "diffusers-group-offload-attention"
SHOWS = "Expected all tensors to be on the same device"
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")


class Net(torch.nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=True)
        self.last = torch.nn.Linear(8, 8)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


def check(gpu, mode, bias=True):
    device = gpu.devices[0]
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    assert_works(gpu, device, lambda: Net(bias), lambda net: net_on(device, net, x), mode)


def net_on(device, net, x):
    """The output on the CPU; a model without hooks goes to the device."""
    if not any(hasattr(module, "_diffusers_hook") for module in net.modules()):
        net.to(device)
    return net(x.to(device)).cpu()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_leaves(gpu, bias):
    check(gpu, LEAF, bias)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_on_a_stream(gpu):
    check(gpu, LEAF | STREAM)


@modes()
def test_every_way(gpu, mode):
    check(gpu, mode)


def test_the_layer_has_no_hook_of_its_own(gpu):
    net = Net()
    names = list(net.state_dict())
    offload(net, gpu.devices[0], LEAF | LOW)
    assert list(net.state_dict()) == names
    assert not hasattr(net.attention.out_proj, "_diffusers_hook")
    stop(net)
    offload(net, gpu.devices[0], BLOCK)


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="earlier releases ask for an accelerator")
def test_a_layer_that_is_called_keeps_its_hook(gpu):
    """A quantized one, say: the fix of its model calls it."""
    net = Net()
    net.attention.out_proj = torch.nn.Linear(8, 8)
    net.attention.out_proj.weight = torch.nn.Parameter(
        torch.zeros(1, 1, dtype=torch.uint8), requires_grad=False
    )
    offload(net, gpu.devices[0], LEAF)
    assert hasattr(net.attention.out_proj, "_diffusers_hook")
