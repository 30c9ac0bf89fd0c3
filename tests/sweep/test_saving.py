"""Every backend saved and read again in every way, from every placement: the output stays the same."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest

from tests.gate import unmet
from tests.rig import models
from tests.sweep.backends import ALL_BACKENDS, in_turn
from tests.sweep.placements import PLACEMENTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the sweep is about the newest releases"),
]


# (kind, way, device) as regular expressions -> what torch says of its own tensors.
KNOWN: dict[tuple[str, str, str], str] = {
    # any tensor in float8
    (
        "(quanto|torchao)-float8",
        "pickled",
        ".*",
    ): "type object 'torch.storage.UntypedStorage' has no attribute 'dtype'",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


_references: dict = {}


def made(kind, saved):
    import torch

    return ALL_BACKENDS[kind](saved, torch.bfloat16, None)


def reference(kind, saved):
    if kind not in _references:
        _references[kind] = run(made(kind, saved))
    return _references[kind]


def run(model, device="cuda:0"):
    import torch

    pipe = models.flux_pipeline(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        pipe.to(device)
    return models.call_flux(pipe, device=device, dtype=torch.bfloat16).cpu()


def assert_same(output, expected):
    import torch

    assert torch.equal(output, expected), f"off by {(output - expected).abs().max()}"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", in_turn("gguf"))  # GGUF is not saved
def test_save_pretrained(rig_devices, kind, placement, saved, tmp_path):
    """Before a run of the pipeline, and after it."""
    import torch
    from diffusers import FluxTransformer2DModel

    expected = reference(kind, saved)
    pipe = models.flux_pipeline(made(kind, saved))
    device = PLACEMENTS[placement](pipe, *rig_devices.devices)
    if placement == "stay":
        pipe.to(device)
    for turn in range(2):
        pipe.transformer.save_pretrained(tmp_path / str(turn))
        again = FluxTransformer2DModel.from_pretrained(tmp_path / str(turn), torch_dtype=torch.bfloat16)
        assert_same(run(again), expected)
        output = models.call_flux(pipe, device=device, dtype=torch.bfloat16).cpu()
        assert_same(output, expected)


def _pickled(model, make):
    return pickle.loads(pickle.dumps(model))


def _copied(model, make):
    return copy.deepcopy(model)


def _by_torch(thing, **options):
    import torch

    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, **{"weights_only": False, **options})


def _torch_save(model, make):
    return _by_torch(model)


def _mapped_to_cpu(model, make):
    return _by_torch(model, map_location="cpu")


def _mapped_to_the_other(model, make):
    return _by_torch(model, map_location={"cuda:0": "cuda:1"})


def _state_dict(model, make):
    twin = make()
    twin.load_state_dict(model.state_dict())
    return twin


def _state_dict_assigned(model, make):
    twin = make()
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def _state_dict_in_a_file(model, make):
    twin = make()
    twin.load_state_dict(_by_torch(model.state_dict()))
    return twin


WAYS = {
    function.__name__[1:].replace("_", " "): function
    for function in (
        _pickled,
        _copied,
        _torch_save,
        _mapped_to_cpu,
        _mapped_to_the_other,
        _state_dict,
        _state_dict_assigned,
        _state_dict_in_a_file,
    )
}


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", in_turn())
def test_in_a_program(rig_devices, kind, way, where, saved):
    import torch

    expected = reference(kind, saved)
    model = made(kind, saved).to(where)
    for pattern, message in KNOWN.items():
        if all(map(re.fullmatch, pattern, (kind, way, where))):
            with pytest.raises((AttributeError, RuntimeError), match=re.escape(message)):
                run(WAYS[way](model, None))
            return

    def make():
        other = made(kind, saved).to(where)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
        return other

    twin = WAYS[way](model, make)
    for name, parameter in twin.named_parameters():
        assert type(parameter) is type(model.get_parameter(name)), name
    assert_same(run(twin), expected)
    assert_same(run(twin.to("cuda:1"), "cuda:1"), expected)
    assert_same(run(model), expected)
