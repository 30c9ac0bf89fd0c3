"""diffusers-gguf-pickle: GGUF models and their state dicts cannot be pickled."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

from tests.fixes import gguf_models

FIX_ID = "diffusers-gguf-pickle"
SHOWS = r"maximum recursion depth exceeded"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def by_torch(thing, **options):
    import torch

    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, **{"weights_only": False, **options})


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


ways = pytest.mark.parametrize("way", [by_pickle, by_torch], ids=["pickle", "torch.save"])


@ways
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model(folder, way):
    import torch

    model = gguf_models.transformer(folder)
    twin = way(model)
    assert len(gguf_models.weights_of(twin)) == len(gguf_models.weights_of(model)) > 0
    assert torch.equal(gguf_models.run(twin), gguf_models.run(model))
    for one, other in zip(gguf_models.weights_of(twin), gguf_models.weights_of(model), strict=True):
        assert vars(one) == vars(other)
        assert one.requires_grad == other.requires_grad


@ways
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_state_dict(folder, way, assign):
    import torch

    model, twin = gguf_models.transformer(folder), gguf_models.transformer(folder)
    for parameter in twin.parameters():
        parameter.data.zero_()
    twin.load_state_dict(way(model.state_dict()), assign=assign)
    assert torch.equal(gguf_models.run(twin), gguf_models.run(model))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_from_one_device_onto_another(gpu, folder):
    """Written from the device, read onto another one."""
    import torch

    here, there = gpu.pair
    model = gguf_models.transformer(folder).to(here)
    reference = gguf_models.run(model, here)
    for where in (there, torch.device("cpu")):
        twin = by_torch(model, map_location=where)
        assert {parameter.device for parameter in twin.parameters()} == {where}
        assert torch.equal(gguf_models.run(twin.to(here), here), reference)


def test_the_bytes_are_in_it_once(folder):
    model = gguf_models.transformer(folder)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert len(pickle.dumps(model)) < 1.3 * size + 65536


def test_weights_only(folder):
    import torch

    weight = gguf_models.weights_of(gguf_models.transformer(folder))[0]
    with pytest.raises(pickle.UnpicklingError, match=r"GGUFParameter|GGMLQuantizationType"):
        by_torch(weight, weights_only=True)
    with torch.serialization.safe_globals([type(weight), type(weight.quant_type)]):
        twin = by_torch(weight, weights_only=True)
    assert twin.quant_type == weight.quant_type
    assert torch.equal(twin.as_tensor(), weight.as_tensor())


def _named():
    """A subclass with an argument without default."""
    from diffusers.quantizers.gguf.utils import GGUFParameter

    class Named(GGUFParameter):
        def __new__(cls, data, label="", **arguments):
            self = super().__new__(cls, data, **arguments)
            self.label = label
            return self

    Named.__module__, Named.__qualname__ = __name__, "Named"
    globals()["Named"] = Named
    return Named


@pytest.mark.parametrize("way", [by_pickle, by_torch, copy.copy, copy.deepcopy])
def test_attributes_and_subclasses(folder, way):
    import torch

    weight = gguf_models.weights_of(gguf_models.transformer(folder))[0]
    named = _named()(weight.as_tensor(), "first", quant_type=weight.quant_type)
    for one in (weight, named):
        one.tag = ["a tag"]
        twin = way(one)
        assert type(twin) is type(one)
        assert vars(twin).items() >= vars(one).items()
        assert (twin.tag is one.tag) == (way is copy.copy)
        assert torch.equal(twin.as_tensor(), one.as_tensor())


@pytest.mark.parametrize("way", [by_pickle, by_torch, copy.copy])
@pytest.mark.parametrize("within", [lambda weight: weight, lambda weight: [weight]], ids=["itself", "a list"])
def test_a_weight_that_refers_to_itself(folder, way, within):
    """Before: it was read without its attributes and its type, and nothing was said."""
    import torch

    weight = gguf_models.weights_of(gguf_models.transformer(folder))[0]
    weight.me = within(weight)
    twin = way(weight)
    inside = twin.me[0] if isinstance(twin.me, list) else twin.me
    assert inside is (weight if way is copy.copy else twin)
    assert twin.quant_type == weight.quant_type
    assert torch.equal(twin.as_tensor(), weight.as_tensor())


def answer(weight, queue):
    """In the spawned process."""
    queue.put((type(weight).__name__, weight.quant_type.name, weight.as_tensor().sum().item()))


@pytest.mark.long
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_spawned_process(folder):
    import torch

    weight = gguf_models.weights_of(gguf_models.transformer(folder))[0]
    pickle.dumps(weight)  # what spawn does as well, but its error is printed only
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=answer, args=(weight, queue))
    worker.start()
    expected = ("GGUFParameter", weight.quant_type.name, weight.as_tensor().sum().item())
    assert queue.get(timeout=120) == expected
    worker.join()
