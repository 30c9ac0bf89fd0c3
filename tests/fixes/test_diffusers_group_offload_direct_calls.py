"""diffusers-group-offload-direct-calls: a layer outside of the blocks that is called by itself."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, LEAF, STREAM, modes, offload, stop

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-direct-calls"
SHOWS = "Expected all tensors to be on the same device"


class Encoder(torch.nn.Module):
    """A text encoder: pipelines call its embeddings, a part of it, or a method."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = torch.nn.Embedding(8, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.projection = torch.nn.Sequential(torch.nn.Linear(8, 8))
        self.last = Part()
        self.requires_grad_(False)

    def forward(self, ids):
        x = self.embeddings(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x=x)[0]

    def features(self, ids):
        return self.last(x=self.embeddings(ids))[0]


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)])

    def forward(self, x):
        for layer in self.inner:
            x = layer(x)
        return (x,)


class LanguageModel(torch.nn.Module):
    """Its embedding is a layer of another layer; pipelines call it, that layer, and the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Encoder()
        self.head = torch.nn.Linear(8, 8)
        self.requires_grad_(False)

    def get_input_embeddings(self):
        return self.model.embeddings

    def forward(self, ids):
        return self.head(self.model(ids))


class Clip(LanguageModel):
    """Its last norm is a layer of another layer; pipelines call it on a state in the middle (``clip_skip``)."""

    def __init__(self):
        super().__init__()
        self.text_model, self.model = self.model, None
        self.text_model.final_layer_norm = torch.nn.LayerNorm(8)
        self.requires_grad_(False)

    def get_input_embeddings(self):
        return self.text_model.embeddings

    def forward(self, ids):
        return self.head(self.text_model.final_layer_norm(self.text_model(ids)))


def of_its_last_norm(model, ids):
    states = model.text_model.embeddings(ids)
    return torch.stack([model(ids), model.text_model.final_layer_norm(states), model(ids)])


def of_all_parts(model, ids):
    """Called as a whole, by parts, and as a whole again."""
    return torch.stack([model(ids), model.embeddings(ids), model.features(ids), model(ids)])


def of_its_language_model(model, ids):
    return torch.stack([model.head(model.model.embeddings(ids)), model.model(ids), model(ids)])


def check(gpu, mode, run, kind=Encoder):
    device = gpu.devices[0]
    ids = torch.arange(4, device=device)
    expected = run(kind().to(device), ids)
    before = gpu.allocated(device)
    model = kind()
    offload(model, device, mode)

    def right(output):
        assert torch.equal(output, expected)
        del output
        stayed = gpu.allocated(device) - before - expected.nbytes
        assert stayed <= 0, f"{stayed} bytes stayed on the device"

    for _ in range(3):
        right(run(model, ids))
    assert_goes_on(lambda: run(model, ids), right)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    right(run(model, ids.cpu()))  # the hook of a model brings the inputs, too
    return model, ids, expected


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_layer_by_itself(gpu):
    check(gpu, BLOCK, lambda model, ids: model.embeddings(ids.to(gpu.devices[0])))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_method(gpu):
    check(gpu, BLOCK | STREAM, lambda model, ids: model.features(ids.to(gpu.devices[0])))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_embedding_of_a_language_model(gpu):
    check(gpu, BLOCK, lambda model, ids: model.model.embeddings(ids.to(gpu.devices[0])), LanguageModel)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_last_norm_of_clip(gpu):
    device = gpu.devices[0]
    states = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)
    check(gpu, BLOCK, lambda model, ids: model.text_model.final_layer_norm(states), Clip)


@modes()
def test_every_way(gpu, mode):
    check(gpu, mode, of_its_last_norm, Clip)
    check(gpu, mode, of_all_parts)
    check(gpu, mode, of_its_language_model, LanguageModel)


def test_the_hooks_go_with_those_of_diffusers(gpu):
    model, ids, expected = check(gpu, BLOCK, of_all_parts)
    assert model.embeddings._forward_pre_hooks
    stop(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(of_all_parts(model.to(gpu.devices[0]), ids), expected)
    offload(model.cpu(), gpu.devices[0], BLOCK)
    assert torch.equal(of_all_parts(model, ids), expected)


def test_another_kind_of_group_has_none(gpu):
    model = Encoder()
    offload(model, gpu.devices[0], LEAF)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_compiled(gpu):
    model, ids, expected = check(gpu, BLOCK, of_all_parts)
    model.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(of_all_parts(model, ids), expected)
