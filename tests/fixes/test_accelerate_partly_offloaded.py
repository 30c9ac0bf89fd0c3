"""accelerate-partly-offloaded: model offload of two models with the same layers."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling

torch = pytest.importorskip("torch")

FIX_ID = "accelerate-partly-offloaded"
SHOWS = "Expected all tensors to be on the same device"


class Net(torch.nn.Module):
    """A ControlNet with the first layer of its transformer, or the transformer; its last layers are in a list."""

    def __init__(self, seed, of=None, scale=False):
        super().__init__()
        torch.manual_seed(seed)
        self.embedder = of.embedder if of else torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        if scale:
            self.scale = torch.nn.Parameter(torch.ones(8))
        self.register_parameter("unused", None)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.embedder(x)
        for block in self.blocks:
            x = x + block(x)
        return x * getattr(self, "scale", 1)


def both(scale):
    transformer = Net(0, scale=scale)
    return transformer, Net(1, of=transformer)


def run(models, x):
    return models[0](models[1](x))


def check(gpu, scale, device):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(gpu.devices[0])
    expected = run([model.to(gpu.devices[0]) for model in both(scale)], x)
    before = gpu.allocated(gpu.devices[0])
    from accelerate import cpu_offload_with_hook

    models, hooks = both(scale), []
    for model in models:  # as diffusers does it: the ControlNet is in no sequence
        hooks.append(cpu_offload_with_hook(model, device)[1])

    def whole(x=x):
        output = run(models, x)
        for hook in hooks:
            hook.offload()
        return output

    def right(output):
        assert torch.equal(output, expected)
        stayed = gpu.allocated(gpu.devices[0]) - before - expected.nbytes
        assert stayed <= 0, f"{stayed} bytes stayed on the device"

    for _ in range(2):
        right(whole())
    right(whole(x.cpu()))
    assert_goes_on(whole, right)


def test_every_spelling(gpu):
    check(gpu, False, spelled(gpu.devices[0]))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_shared_layers(gpu):
    """With an index, as diffusers gives it; without one accelerate moves every model in every pass."""
    check(gpu, False, gpu.devices[0])


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_part_that_was_taken_back(gpu):
    from accelerate import cpu_offload_with_hook

    device = gpu.devices[0]
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    transformer, _ = both(True)
    expected = transformer.to(device)(x)
    transformer, _ = cpu_offload_with_hook(transformer.cpu(), device)
    transformer(x)
    transformer.blocks[1].to("cpu")
    assert torch.equal(transformer(x), expected)


def test_compiled(gpu):
    from accelerate import cpu_offload_with_hook

    device = gpu.devices[0]
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    transformer, controlnet = both(False)
    expected = run((transformer.to(device), controlnet.to(device)), x)
    models = [cpu_offload_with_hook(model.cpu(), device)[0] for model in (transformer, controlnet)]
    for model in models:
        model.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(run(models, x), expected)
