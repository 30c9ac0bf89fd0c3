"""bnb-params-pickle: pickled 4-bit and 8-bit weights come back as plain parameters."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest

from diffusers_quantfix.weights.companions import companions
from tests.fixes import eight_bit, four_bit
from tests.gate import unmet

FIX_ID = "bnb-params-pickle"
SHOWS = "became a Parameter"
CLASSES = {4: "Params4bit", 8: "Int8Params"}

bits = pytest.mark.parametrize("bits", [4, 8])


def stack(width: int, device):
    return {4: four_bit, 8: eight_bit}[width].stack(device)


def run(width: int, model, device):
    return {4: four_bit, 8: eight_bit}[width].run(model, device)


def weights(model) -> list:
    return [module.weight for module in model.modules() if type(module).__name__.startswith("Linear")]


def by_torch(model, **options):
    import torch

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, **{"weights_only": False, **options})


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [by_pickle, by_torch], ids=["pickle", "torch.save"])
@bits
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model(gpu, bits, way):
    """On the CPU, where every process can read it; then it moves like the one that was written."""
    import torch

    here, there = gpu.pair
    model, reference = stack(bits, here), run(bits, stack(bits, here), here)
    twin = way(model.to("cpu"))
    for weight in weights(twin):
        assert type(weight).__name__ == CLASSES[bits], f"the weight became a {type(weight).__name__}"
    assert torch.equal(run(bits, twin.to(here), here), reference)
    twin.to(there)
    for module in twin.modules():
        for one in companions(module):
            assert one.tensor.device == there, one.name
    assert torch.equal(run(bits, twin, there), reference)
    if bits == 4:
        for layer in four_bit.layers_of(twin):
            assert layer.weight.module is layer
            assert layer.quant_state is layer.weight.quant_state


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
def test_on_a_machine_without_gpu():
    import torch

    model = four_bit.stack("cpu")
    reference = four_bit.run(copy.deepcopy(model), "cpu")
    twin = by_pickle(model)
    for weight in weights(twin):
        assert type(weight).__name__ == "Params4bit", f"the weight became a {type(weight).__name__}"
    assert torch.equal(four_bit.run(twin, "cpu"), reference)


@bits
def test_a_parameter_alone(gpu, bits):
    import torch

    weight = weights(stack(bits, gpu.devices[0]).to("cpu"))[0]
    for twin in (by_pickle(weight), by_torch(weight)):
        assert type(twin) is type(weight)
        assert torch.equal(twin.data, weight.data)
        assert not twin.requires_grad
        assert vars(twin).keys() == vars(weight).keys()
        if bits == 4:
            assert torch.equal(twin.quant_state.absmax, weight.quant_state.absmax)
            assert (twin.module is None) == (weight.module is None)
        else:
            assert torch.equal(twin.SCB, weight.SCB)
            assert twin.CB.data_ptr() == twin.data_ptr(), "CB is another copy of the matrix"
    if bits == 8:
        weight.tag = "a tag"
        assert by_pickle(weight).tag == "a tag"
        assert type(copy.copy(weight)) is type(weight)


@bits
def test_the_bytes_are_in_it_once(gpu, bits):
    model = stack(bits, gpu.devices[0]).to("cpu")
    assert len(pickle.dumps(model)) < 1.2 * four_bit.bytes_of(model) + 8192


@bits
def test_weights_only(gpu, bits):
    """State dicts load under ``weights_only`` as ever; the parameters themselves once their classes are allowed."""
    import torch
    from bitsandbytes import functional, nn

    model = stack(bits, gpu.devices[0]).to("cpu")
    saved = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert four_bit.differences(saved, by_torch(saved, weights_only=True)) == []
    weight = weights(model)[0]
    if bits == 4:
        weight.module = None  # the layer would be in the file as well
    with pytest.raises(pickle.UnpicklingError, match=f"{CLASSES[bits]}|QuantState"):
        by_torch(weight, weights_only=True)
    allowed = [nn.Int8Params] if bits == 8 else [nn.Params4bit, functional.QuantState, torch.Size]
    with torch.serialization.safe_globals(allowed):
        twin = by_torch(weight, weights_only=True)
    assert type(twin) is type(weight)
    assert torch.equal(twin.data, weight.data)


def _subclasses(bits: int) -> dict:
    """Subclasses as users write them: an argument without default, and a state of their own."""
    from bitsandbytes import nn

    upstream = getattr(nn, CLASSES[bits])

    class Named(upstream):
        def __new__(cls, data, label, **arguments):
            self = super().__new__(cls, data, **arguments)
            self.label = label
            return self

    class Described(upstream):
        def __getstate__(self):
            state = {name: value for name, value in vars(self).items() if name != "module"}
            return {**state, "described": "by __getstate__"}

    class Own(upstream):
        def __getstate__(self):
            return ["own", self.data]

        def __setstate__(self, state):
            self.data, self.read = state[1], state[0]

    found = {}
    for cls in (Named, Described, Own):
        name = f"{cls.__name__}{bits}"
        cls.__module__, cls.__qualname__ = __name__, name
        found[cls.__name__] = globals()[name] = cls
    return found


def _data(bits: int):
    import torch

    return (
        torch.arange(32, dtype=torch.uint8).view(-1, 1)
        if bits == 4
        else torch.arange(4, dtype=torch.int8).view(2, 2)
    )


ways = pytest.mark.parametrize("way", [by_pickle, by_torch], ids=["pickle", "torch.save"])


@ways
@bits
@pytest.mark.parametrize("trained", [False, True])
def test_attributes_and_the_constructor_of_a_subclass(bits, way, trained):
    import torch

    data = _data(bits).float() if trained else _data(bits)
    weight = _subclasses(bits)["Named"](data, "first", requires_grad=trained)
    weight.tag = "a tag"
    twin = way(weight)
    assert (type(twin), twin.label, twin.tag) == (type(weight), "first", "a tag")
    assert (twin.requires_grad, twin.is_leaf) == (trained, True)
    assert torch.equal(twin.data, data)
    assert vars(twin).keys() == vars(weight).keys()


@ways
@bits
def test_the_own_state_of_a_subclass(bits, way):
    import torch

    classes = _subclasses(bits)
    described = way(classes["Described"](_data(bits), requires_grad=False))
    assert (type(described), described.described) == (classes["Described"], "by __getstate__")
    own = way(classes["Own"](_data(bits), requires_grad=False))
    assert (type(own), own.read) == (classes["Own"], "own")
    assert torch.equal(described.data, _data(bits))
    assert torch.equal(own.data, _data(bits))


@pytest.mark.parametrize(
    "way", [by_pickle, by_torch, copy.deepcopy], ids=["pickle", "torch.save", "deepcopy"]
)
def test_a_state_that_calls_upstreams(way):
    """Params4bit's own ``__setstate__`` leaves out what a user adds; a class that calls it may change it, too."""
    from bitsandbytes.nn import Params4bit

    class Calls(Params4bit):
        def __getstate__(self):
            state = super().__getstate__()
            state.pop("secret", None)
            return {**state, "extra": 7}

        def __setstate__(self, state):
            self.read = state["extra"]
            super().__setstate__(state)
            self.changed = state["changed"] + 1

    Calls.__module__, Calls.__qualname__ = __name__, "Calls"
    globals()["Calls"] = Calls
    weight = Calls(_data(4), requires_grad=False)
    weight.tag, weight.secret, weight.changed = ["a tag"], "a secret", 1
    if not hasattr(weight, "module"):
        weight.module = None
    twin = way(weight)
    assert (type(twin), twin.read, twin.tag, twin.changed) == (Calls, 7, ["a tag"], 2)
    assert not hasattr(twin, "secret") and not hasattr(twin, "extra")
    assert twin.tag is not weight.tag
    twice = way([weight, weight])
    assert twice[0] is twice[1]


@ways
def test_attributes_of_a_weight_with_its_layer(way):
    """The layer refers back to its weight."""
    from bitsandbytes import nn

    layer = nn.Linear4bit(64, 64)
    layer.weight.tag = "a tag"
    if layer.weight.module is None:
        layer.weight.module = layer
    weight = way(layer.weight)
    assert weight.tag == "a tag"
    assert weight.module.weight is weight
    twin = way(layer)
    assert twin.weight.tag == "a tag"
    assert twin.weight.module is twin


@bits
def test_weights_only_of_a_weight_with_attributes(bits):
    import torch
    from bitsandbytes import nn

    weight = getattr(nn, CLASSES[bits])(_data(bits), requires_grad=False)
    weight.tag = "a tag"
    if bits == 4:
        weight.quant_state = weight.module = None
    with torch.serialization.safe_globals([type(weight), torch._utils._set_obj_state]):
        assert by_torch(weight, weights_only=True).tag == "a tag"


REFERENCES = {
    "itself": lambda weight: weight,
    "a list": lambda weight: [weight],
    "a tuple": lambda weight: ("a tag", weight),
    "a set": lambda weight: {weight},
}


@ways
@bits
@pytest.mark.parametrize("name", REFERENCES)
def test_a_weight_that_refers_to_itself(bits, way, name):
    """Before: RecursionError; without the package an 8-bit weight is saved, and loses all its attributes."""
    import torch
    from bitsandbytes import nn

    for cls in (getattr(nn, CLASSES[bits]), _subclasses(bits)["Named"]):
        label = {} if cls.__name__ in CLASSES.values() else {"label": "first"}
        weight = cls(_data(bits), **label, requires_grad=False)
        weight.tag, weight.me = "a tag", REFERENCES[name](weight)
        twin = way(weight)
        assert (type(twin), twin.tag) == (cls, "a tag")
        assert torch.equal(twin.data, _data(bits))
        inside = twin.me if twin.me is twin else list(twin.me)[-1]
        assert inside is twin
        assert vars(twin).keys() == vars(weight).keys()
        if bits == 8:  # the other has its own `__copy__`
            assert copy.copy(weight).me is weight.me


@ways
@bits
def test_two_weights_that_refer_to_each_other(bits, way):
    from bitsandbytes import nn

    one, other = (getattr(nn, CLASSES[bits])(_data(bits), requires_grad=False) for _ in range(2))
    one.peer, other.peer = other, one
    first, second = way([one, other])
    assert first.peer is second and second.peer is first


class Written:
    """Is pickled as an earlier version of this package pickled a weight."""

    def __init__(self, reduced):
        self.reduced = reduced

    def __reduce_ex__(self, protocol):
        return self.reduced


@bits
def test_files_of_earlier_versions(bits):
    import torch
    from bitsandbytes import nn
    from torch._tensor import _rebuild_from_type_v2

    cls = getattr(nn, CLASSES[bits])
    weight = cls(_data(bits), requires_grad=False)
    if bits == 4:
        formats = [(cls, (), {**vars(weight), "data": weight.data, "requires_grad": False})]
    else:
        held = {**vars(weight), "tag": "a tag"}
        formats = [
            (cls, (weight.data, False, False, weight.CB, weight.SCB)),
            (_rebuild_from_type_v2, (cls, cls, (weight.data, False), held)),
        ]
    for written in formats:
        twin = by_pickle(Written(written))
        assert type(twin) is cls
        assert torch.equal(twin.data, weight.data)


READER = """
import sys, torch
model, run = torch.load(sys.argv[1], weights_only=False), torch.load(sys.argv[2])
print([type(layer.weight).__name__ for layer in (model[0], model[2])], "diffusers_quantfix" in sys.modules)
assert model[0].weight.tag == "a tag"
with torch.no_grad():
    print(torch.equal(model.to("cpu")(run["inputs"]), run["outputs"]))
"""


def test_a_weight_on_meta(gpu):
    """As sequential offload leaves it. Before: RuntimeError "Attempted to call `variable.set_data(tensor)`" on load."""
    weight = four_bit.linear(gpu.devices[0]).weight
    offloaded = type(weight)(
        weight.data.to("meta"), requires_grad=False, quant_state=weight.quant_state, bnb_quantized=True
    )
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(offloaded, protocol))
        assert type(loaded) is type(weight) and loaded.is_meta
        assert loaded.bnb_quantized and loaded.quant_state is not None


def test_it_is_loaded_onto_meta(gpu, tmp_path):
    """To look at sizes, as a file of bitsandbytes' own can be. Before: RuntimeError "Attempted to call
    `variable.set_data(tensor)`"."""
    import torch

    model = four_bit.stack(gpu.devices[0])
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", map_location="meta", weights_only=False)
    for layer, found in zip(model, loaded, strict=True):
        if isinstance(layer, torch.nn.Linear):
            assert type(found.weight) is type(layer.weight) and found.weight.is_meta
            assert found.weight.shape == layer.weight.shape
            if layer.weight.quant_state is not None:
                assert found.weight.quant_state.absmax.is_meta
                assert found.weight.module is found


@pytest.mark.long
@pytest.mark.thorough
def test_it_is_read_without_this_package(tmp_path):
    import torch

    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"4-bit layers run on the CPU from 0.46 on; {sentence}")
    model = four_bit.stack("cpu")
    model[0].weight.tag = "a tag"
    inputs = four_bit.batch("cpu")
    torch.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        torch.save({"inputs": inputs, "outputs": model(inputs)}, tmp_path / "run.pt")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "model.pt"), str(tmp_path / "run.pt")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["['Params4bit', 'Params4bit'] False", "True"], done.stderr


def answer(model, inputs, queue):
    """In the spawned process: class, output, and the output after a move."""
    import torch

    with torch.no_grad():
        queue.put((type(model[0].weight).__name__, model.to("cpu")(inputs).tolist()))


@pytest.mark.thorough
@pytest.mark.long
def test_a_spawned_process():
    import torch

    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"4-bit layers run on the CPU from 0.46 on; {sentence}")
    model = four_bit.stack("cpu")
    inputs = four_bit.batch("cpu")
    with torch.no_grad():
        expected = copy.deepcopy(model)(inputs).tolist()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=answer, args=(model, inputs, queue))
    worker.start()
    assert queue.get(timeout=120) == ("Params4bit", expected)
    worker.join()
