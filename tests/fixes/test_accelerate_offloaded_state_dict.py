"""accelerate-offloaded-state-dict: the state dict of a sequentially offloaded model has no data."""

from __future__ import annotations

import functools

import pytest

from tests.fixes import eight_bit, four_bit
from tests.fixes.callers import spelled
from tests.fixes.callers import without_index as without_index
from tests.rig import models

FIX_ID = "accelerate-offloaded-state-dict"
SHOWS = r"Cannot copy out of meta tensor; no data!|The weights trying to be saved contained shared tensors"
EMPTY = r"on meta: \["

everything = pytest.mark.parametrize("name", ["flux_transformer", "unet", "vae", "t5_encoder", "clip_text"])


def offload(model, device="cpu", **options):
    from accelerate import cpu_offload

    return cpu_offload(model, spelled(device), **options)


def assert_full(state) -> None:
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    assert not empty, f"on meta: {empty}"


@everything
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_offloaded_model_is_saved(tmp_path, name):
    """Nothing quantized, no GPU: what is on disk is the model."""
    if name in ("flux_transformer", "unet", "vae"):
        pytest.importorskip("diffusers")
    saved = getattr(models, name)()
    model = offload(getattr(models, name)())
    assert next(model.parameters()).is_meta
    again = type(model).from_pretrained(models.saved(model, tmp_path))
    assert four_bit.differences(four_bit.state_of(again), four_bit.state_of(saved)) == []


@pytest.mark.usefixtures("without_index")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS + r"|item\(\) cannot be called on meta tensors")
def test_a_quantized_pipeline_is_saved_while_it_is_offloaded(gpu, tmp_path, bits):
    """The reloaded one has the same weights, companions included, and the same output; the saved one still works."""
    import torch

    diffusers = pytest.importorskip("diffusers")
    here = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path / "flux")
    load = functools.partial(four_bit.load, bits=bits)

    def pipeline(model):
        return models.flux_pipeline(model)

    original = load(diffusers.FluxTransformer2DModel, folder)
    saved = four_bit.state_of(original)
    reference = models.call_flux(pipeline(original), here).cpu()
    offloaded = pipeline(load(diffusers.FluxTransformer2DModel, folder))
    offload(offloaded.transformer, here)
    offloaded.transformer.save_pretrained(tmp_path / "again")
    again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "again", torch_dtype=torch.float16)
    assert four_bit.differences(four_bit.state_of(again), saved) == []
    assert torch.equal(models.call_flux(pipeline(again), here).cpu(), reference)
    assert torch.equal(models.call_flux(offloaded, here).cpu(), reference)


@pytest.mark.defect(FIX_ID, shows=EMPTY)
def test_an_8bit_stack(gpu):
    """An 8-bit layer without its scales writes neither SCB nor weight_format; they come from the weights map too."""
    here = gpu.devices[0]
    saved = four_bit.state_of(eight_bit.stack(here))
    model = offload(eight_bit.stack(here), here)
    for run in (False, True):
        if run:
            eight_bit.run(model, here)
        assert_full(model.state_dict())
        assert four_bit.differences(four_bit.state_of(model), saved) == []


def mlp():
    import torch

    torch.manual_seed(0)
    parts = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8, bias=False)
    )
    return torch.nn.Sequential(parts, torch.nn.Linear(8, 8)).eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"offload_buffers": True}, {"preload_module_classes": ["Sequential"]}],
    ids=lambda o: " ".join(o),
)
@pytest.mark.defect(FIX_ID, shows=EMPTY)
def test_every_way_to_offload(options):
    saved = four_bit.state_of(mlp())
    model = offload(mlp(), **options)
    assert_full(model.state_dict())
    assert four_bit.differences(four_bit.state_of(model), saved) == []
    assert_full(model.state_dict(prefix="model."))
    assert list(model.state_dict(prefix="model.")) == [f"model.{name}" for name in saved]


@pytest.mark.defect(FIX_ID, shows=EMPTY)
def test_a_second_offload_of_an_offloaded_model():
    """accelerate makes its weights map of the state dict: without data in it, the weights are lost."""
    import torch

    inputs, reference = torch.ones(2, 8), mlp()(torch.ones(2, 8))
    model = offload(mlp())
    assert_full(model.state_dict())
    offload(model)
    assert torch.equal(model(inputs), reference)


def test_nothing_is_copied():
    model = offload(mlp())
    stored = model[1]._hf_hook.weights_map["weight"]
    assert model.state_dict()["1.weight"].data_ptr() == stored.data_ptr()


def test_nothing_is_left_after_the_hooks():
    from accelerate.hooks import remove_hook_from_module

    model = offload(mlp())
    assert any(module._state_dict_hooks for module in model.modules())
    remove_hook_from_module(model, recurse=True)
    assert not any(module._state_dict_hooks for module in model.modules())
    assert four_bit.differences(four_bit.state_of(model), four_bit.state_of(mlp())) == []


def test_weights_on_disk_stay_there(tmp_path):
    """To read all of them at once would defeat their purpose."""
    import torch
    from accelerate import disk_offload

    model = mlp()
    disk_offload(model, str(tmp_path), torch.device("cpu"))
    assert model.state_dict()["1.weight"].is_meta
