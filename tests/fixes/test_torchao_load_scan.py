"""torchao-load-scan: loading a checkpoint of torchao looks at each of its keys a few times."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixes import torchao_models as ao
from tests.gate import unmet

FIX_ID = "torchao-load-scan"
SHOWS = r"\d+ names were compared"
pytestmark = pytest.mark.skipif(bool(unmet("torchao>=0.15")), reason=str(unmet("torchao>=0.15")))


class Name(str):
    """A key that counts how often it is compared."""

    seen = 0

    def startswith(self, *args):
        Name.seen += 1
        return super().startswith(*args)


def support():
    from torchao.prototype.safetensors import safetensors_support

    return safetensors_support


def upstreams(tensors, metadata):
    """What the function of torchao itself gives, or how it fails."""
    function = support().unflatten_tensor_state_dict
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    assert "torchao" in function.__code__.co_filename
    return outcome(function, tensors, metadata)


def ours(tensors, metadata):
    return outcome(support().unflatten_tensor_state_dict, tensors, metadata)


def outcome(function, tensors, metadata):
    """Names in order with what is in them, and what is left; or the type and text of the error."""
    before = dict(tensors), dict(metadata)
    try:
        found, left = function(tensors, metadata)
    except Exception as error:
        return type(error), str(error)
    finally:
        assert (tensors, metadata) == before
    return [(name, told(tensor)) for name, tensor in found.items()], [(key, id(left[key])) for key in left]


def told(tensor):
    if not hasattr(tensor, "__tensor_flatten__"):
        return id(tensor)
    names, context = tensor.__tensor_flatten__()
    return type(tensor), repr(context), [told(getattr(tensor, name)) for name in names]


def state(weights: str, count: int = 12) -> dict:
    """Of layers with names of which some begin as others do, at several depths."""
    import torch
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = torch.nn.Module()
    names = ["a", "a_b", "a__weight", "_", "weight", *(f"layer_{i}" for i in range(count))]
    for name in names:
        model.add_module(name, torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)))
    model.bfloat16().requires_grad_(False)
    quantize_(model, newest(weights))
    return model.state_dict()


def newest(weights: str):
    from torchao import quantization

    return quantization.Int8WeightOnlyConfig(version=2) if weights == "int8" else ao.config(weights)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_each_key_is_looked_at_a_few_times(weights):
    tensors, metadata = flat(weights, 48)
    tensors = {Name(key): value for key, value in tensors.items()}
    Name.seen = 0
    found, left = support().unflatten_tensor_state_dict(tensors, metadata)
    assert not left and len(found) == len(json.loads(metadata["tensor_names"]))
    assert Name.seen <= 8 * len(tensors), f"{Name.seen} names were compared for {len(tensors)} tensors"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_one_layer_after_the_other_with_the_metadata_of_all():
    """As transformers calls it."""
    tensors, metadata = flat("float8", 48)
    metadata = {Name(key): value for key, value in metadata.items()}
    Name.seen = 0
    for name in json.loads(metadata["tensor_names"]):
        parts = parts_of(tensors, name)
        found, left = support().unflatten_tensor_state_dict(parts, metadata)
        assert [*found] == [name] and not left
    assert Name.seen <= 8 * len(tensors), f"{Name.seen} names were compared for {len(tensors)} tensors"


def flat(weights: str, count: int = 12):
    if not hasattr(support(), "flatten_tensor_state_dict"):
        pytest.skip("this torchao cannot save these weights in safetensors")
    with ao.skipped_where_not_saved():
        return support().flatten_tensor_state_dict(state(weights, count))


def parts_of(tensors, name):
    module, _, weight = name.rpartition(".")
    prefix = f"{module}._{weight}_"
    return {key: tensor for key, tensor in tensors.items() if key == name or key.startswith(prefix)}


@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_the_same_as_torchao(weights):
    """All of a checkpoint, a part of it, other keys among it, an empty one; again; in another order."""
    tensors, metadata = flat(weights)
    keys = list(tensors)
    generator = random.Random(0)
    some = [generator.sample(keys, n) for n in (len(keys), len(keys) // 2, 7, 1)]
    for chosen in (keys, [], keys[:1], keys[1:], *some):
        few = {key: tensors[key] for key in chosen}
        for given in (
            few,
            {**few, "a._weight": tensors[keys[0]], "a._weight_more": tensors[keys[0]], "x": tensors[keys[0]]},
        ):
            assert ours(given, metadata) == upstreams(given, metadata)
            assert ours(given, dict(metadata)) == upstreams(given, metadata)


def test_metadata_that_are_unusual_or_wrong():
    """What torchao refuses is refused with its words."""
    tensors, metadata = flat("float8")
    names = json.loads(metadata["tensor_names"])
    cases = [
        {},
        {"tensor_names": "no json"},
        {**metadata, "tensor_names": json.dumps([*names, names[0]])},
        {**metadata, "tensor_names": json.dumps([*names, "root"])},
        {**metadata, "tensor_names": json.dumps([*names, "not.there"])},
        {**metadata, "tensor_names": json.dumps(names[::-1])},
        {**metadata, "tensor_names": json.dumps(names[:5])},
        {**metadata, "tensor_names": json.dumps([*names, 1])},
        {**metadata, "tensor_names": json.dumps(dict.fromkeys(names, 0))},
        {**metadata, names[0]: '{"_type": "Strange"}'},
        {**metadata, names[0]: "no json"},
        {**metadata, "format": "pt", "a.0._weight_x": "{}"},
        {**metadata, "a._0.weight_qdata": "{}"},
    ]
    for given in cases:
        assert ours(tensors, given) == upstreams(tensors, given), given.get("tensor_names")
        assert ours({}, given) == upstreams({}, given)
    # And one that is right, after all of these.
    assert ours(tensors, metadata) == upstreams(tensors, metadata)


def test_metadata_that_are_changed_between_two_calls():
    tensors, metadata = flat("float8")
    assert ours(tensors, metadata) == upstreams(tensors, metadata)
    names = json.loads(metadata["tensor_names"])
    for text in (json.dumps(names[:3]), json.dumps(names[3:])):
        metadata["tensor_names"] = text
        assert ours(tensors, metadata) == upstreams(tensors, metadata)
    metadata["tensor_names"] = json.dumps(names)
    other = next(name for name in names if "float8" in metadata[name].lower())
    metadata[other] = '{"_type": "Strange"}'
    assert ours(tensors, metadata) == upstreams(tensors, metadata)


def test_two_checkpoints_in_two_threads():
    checkpoints = [flat(weights, count) for weights in ao.WEIGHTS for count in (3, 9)]
    wanted = [upstreams(*checkpoint) for checkpoint in checkpoints]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ours, *checkpoints[i % 4]) for i in range(64)]
        for i, job in enumerate(jobs):
            assert job.result() == wanted[i % 4]


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.37.0", "torchao>=0.16"))
def test_a_saved_model_is_loaded_by_diffusers(tmp_path, monkeypatch):
    """From one file and from several, of which one ends between two parts of a weight."""
    import torch
    from diffusers import FluxTransformer2DModel, TorchAoConfig

    from tests.rig import models

    models.flux_transformer(num_layers=2, num_single_layers=4).save_pretrained(tmp_path / "plain")
    saved = FluxTransformer2DModel.from_pretrained(
        tmp_path / "plain", quantization_config=TorchAoConfig(newest("float8")), torch_dtype=torch.bfloat16
    )
    real = support().unflatten_tensor_state_dict
    counted = []

    def counting(tensors, metadata):
        Name.seen = 0
        named = {Name(key): value for key, value in tensors.items()}
        result = real(named, metadata)
        counted.append((Name.seen, len(named)))
        return result

    from diffusers.quantizers.torchao import torchao_quantizer

    monkeypatch.setattr(torchao_quantizer, "unflatten_tensor_state_dict", counting)
    for size in ("10GB", "60KB"):
        folder = tmp_path / size
        saved.save_pretrained(folder, max_shard_size=size)
        loaded = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        for (name, one), other in zip(saved.named_parameters(), loaded.parameters(), strict=True):
            same = (one.dequantize(), other.dequantize()) if hasattr(one, "qdata") else (one, other)
            assert torch.equal(*same), name
    assert counted
    seen = sum(names for names, _ in counted)
    assert seen <= 8 * sum(keys for _, keys in counted), f"{seen} names were compared"
