"""accelerate-partly-offloaded: model offload of a model whose first parameter is on the device already."""

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


class Encoder(Net):
    """Takes its inputs by name, in nested containers too, and beside them what is no tensor."""

    def forward(self, x, options=None, *, more=(), flag="on"):
        x = super().forward(x)
        for one in (*(options or {}).values(), *(one for pair in more for one in pair)):
            x = x + one
        assert flag == "on"
        return x


def passes(device):
    """Four calls; nothing is offloaded between them, and some of their inputs are on the CPU."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    return [
        ((x,), {}),
        ((), {"x": x}),
        ((x.to(device),), {"options": {"a": x, "b": x.to(device)}}),
        ((x.to(device),), {"more": [(x, x.to(device)), (x,)], "flag": "on"}),
    ]


@pytest.mark.defect(FIX_ID, shows="same device")
@pytest.mark.parametrize("first", range(4))
def test_inputs_on_the_cpu_in_every_pass(gpu, first):
    from accelerate import cpu_offload_with_hook

    device = gpu.devices[0]
    calls = passes(device)
    calls = calls[first:] + calls[:first]
    everywhere = [moved(call, device) for call in calls]
    model = Encoder(0).to(device)
    expected = [model(*args, **kwargs) for args, kwargs in everywhere]
    model, hook = cpu_offload_with_hook(Encoder(0), device)

    def run():
        outputs = [model(*args, **kwargs) for args, kwargs in calls]
        hook.offload()
        return outputs

    def right(outputs):
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
        assert all(output.device == device for output in outputs)
        assert all(one.is_cpu for one in model.parameters())

    for _ in range(2):
        right(run())
    assert_goes_on(run, right)


def moved(inputs, device):
    """The same inputs, all on the device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, dict):
        return {name: moved(one, device) for name, one in inputs.items()}
    return type(inputs)(moved(one, device) for one in inputs) if isinstance(inputs, (tuple, list)) else inputs


@pytest.mark.defect(FIX_ID, shows="same device")
def test_a_text_encoder_of_transformers(gpu):
    transformers = pytest.importorskip("transformers")
    from accelerate import cpu_offload_with_hook

    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = transformers.T5EncoderModel(config).eval()
    prompts = [torch.arange(8)[None].roll(by) for by in range(3)]
    with torch.no_grad():
        model.to(gpu.devices[0])
        expected = [model(prompt.to(gpu.devices[0]))[0] for prompt in prompts]
        model, hook = cpu_offload_with_hook(model.cpu(), gpu.devices[0])
        outputs = [model(prompt)[0] for prompt in prompts]
    hook.offload()
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


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
