"""``torch.load`` with every kind of ``map_location``, from the first device to the second."""

from __future__ import annotations

import io

import pytest

MAPS = {"dict": {"cuda:0": "cuda:1"}, "text": "cuda:1", "device": "device"}
each_map = pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
SHOWS = "on the same device|reports another device"


def reloaded(thing, places):
    """``thing`` after ``torch.save`` and ``torch.load`` with ``map_location=places``."""
    import torch

    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    places = torch.device("cuda:1") if places == "device" else places
    return torch.load(file, map_location=places, weights_only=False)


def assert_moved(model, places, run) -> None:
    """``model``, which is on cuda:0, is on cuda:1 after it was loaded with ``places``: its state dict, and itself.

    Args:
        run: gives the output of a model on a device, on the CPU.
    """
    import torch

    expected = run(model, "cuda:0")
    for name, tensor in reloaded(model.state_dict(), places).items():
        assert str(tensor.device) == "cuda:1", f"{name} reports another device than it is on"
    twin = reloaded(model, places)
    assert torch.equal(run(twin, "cuda:1"), expected)
    assert torch.equal(run(twin.to("cuda:0"), "cuda:0"), expected)
