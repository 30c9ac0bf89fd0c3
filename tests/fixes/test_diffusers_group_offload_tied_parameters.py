"""diffusers-group-offload-tied-parameters: a shared parameter stays behind under leaf-level group offloading."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_works, modes, offload
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-tied-parameters"
SHOWS = "on the same device|different from other tensors"
leaf = modes("leaf", "leaf-stream", "leaf-low", "leaf-record")


class Table(torch.nn.Module):
    """An embedding that is no layer of torch's."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, ids):
        return self.weight[ids]


class Encoder(torch.nn.Module):
    """Like T5 in transformers 5: ``shared`` is never called, its parameter is that of ``embed_tokens``."""

    def __init__(self, layer, kind=Table, both=False):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(64, four_bit.FEATURES))
        self.shared, self.embed_tokens = (
            kind(weight) if kind is Table else torch.nn.Embedding(64, four_bit.FEATURES, _weight=weight)
            for _ in range(2)
        )
        self.embed_tokens.weight = self.shared.weight
        self.layer, self.last = layer, torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES)
        self.both = both

    def forward(self, ids):
        first = self.last(self.shared(ids)) if self.both else 0
        return self.layer(self.embed_tokens(ids) + first)


def run(model, device):
    with torch.no_grad():
        return model(torch.arange(8, device=device)).cpu()


def check(gpu, mode, bits=16, **options):
    device = gpu.devices[0]

    def build():
        torch.manual_seed(1)
        layer = (
            four_bit.linear(device) if bits == 4 else torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES)
        )
        return Encoder(layer, **options).to(device).eval()

    assert_works(gpu, device, build, lambda model: run(model, device), mode)


@leaf
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_comes_for_the_module_that_is_called(gpu, mode):
    check(gpu, mode)


@modes("leaf")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_both_are_called(gpu, mode):
    check(gpu, mode, both=True)


@leaf
def test_beside_4bit_layers(gpu, mode):
    check(gpu, mode, bits=4)


@leaf
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers<0.36")
def test_embeddings(gpu, mode):
    """From 0.36 on they are layers that group offloading knows."""
    check(gpu, mode, kind=torch.nn.Embedding)


@leaf
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers<0.36")
def test_t5(gpu, mode):
    if sentence := unmet("transformers>=5"):
        pytest.skip(f"T5 has one module for both before; {sentence}")
    from transformers import T5Config, T5EncoderModel

    device = gpu.devices[0]
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    model = T5EncoderModel(config).eval()

    def build():
        return copy.deepcopy(model).to(device)

    def encode(one):
        with torch.no_grad():
            return one(torch.arange(8, device=device)[None]).last_hidden_state.cpu()

    assert_works(gpu, device, build, encode, mode)


def gathered(model, modules=()):
    from diffusers.hooks import group_offloading

    gather = group_offloading._gather_parameters_with_no_group_offloading_parent
    return gather(model, set(modules))


def test_what_is_not_shared_is_named_as_before():
    """Nothing twice: neither a module that stands in the model twice, nor a part of a layer that brings its own."""
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(
        layer, layer, torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(1))})
    )
    assert [name for name, _ in gathered(model)] == ["0.weight", "0.bias", "2.a"]
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    tied[1][0].weight = tied[0].weight
    assert [name for name, _ in gathered(tied, ["0", "1"])] == []
    assert [name for name, _ in gathered(tied, ["0"])][:1] == ["1.0.bias"]


def test_a_parameter_of_the_model_itself(gpu):
    """The second owner may be the model."""
    device = gpu.devices[0]
    model = Encoder(torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES)).eval()
    model.again = model.shared.weight
    expected = run(copy.deepcopy(model).to(device), device)
    offload(model, device, {"offload_type": "leaf_level"})
    for _ in range(2):
        assert torch.equal(run(model, device), expected)
