"""diffusers-quanto-string-map and diffusers-quanto-warmup: a device_map for models with weights of quanto."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.rig import models

STRING = "diffusers-quanto-string-map"
WARM_UP = "diffusers-quanto-warmup"
NOT_IN_STRING = "'in <string>' requires string as left operand, not NoneType"
NOT_FOUND = r"name=.*weight\._data not found in model"
NEEDS = ("diffusers>=0.33", "optimum-quanto>=0.2.6")
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
ONE_DEVICE = ("cuda", "cuda:1", 1, {"": "cuda:1"}, {"": 0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("quanto")
    models.flux_transformer().save_pretrained(path)
    return path


def load(folder, quantize: bool = True, weights: str = "int8", **options):
    import diffusers
    import torch

    if quantize:
        options["quantization_config"] = diffusers.QuantoConfig(weights_dtype=weights)
    return diffusers.FluxTransformer2DModel.from_pretrained(
        folder, torch_dtype=torch.float16, **options
    ).eval()


def run(model):
    import torch

    device = next(model.parameters()).device
    assert {parameter.device for parameter in model.parameters()} == {device}
    with torch.no_grad():
        return models.call_flux(models.flux_pipeline(model), device=device).cpu()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.defect(STRING, shows=NOT_IN_STRING, needs=NEEDS)
def test_a_plan_by_name(gpu, folder, plan):
    import torch

    model = load(folder, device_map=plan)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert torch.equal(run(model), run(load(folder, device_map={"": "cuda:0"})))


@pytest.mark.defect(STRING, shows=NOT_IN_STRING, needs=NEEDS)
def test_max_memory_is_heeded(rig_devices, folder):
    model = load(folder, device_map="auto", max_memory={0: 150_000, 1: 900_000})
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:1"}
    run(model)


def test_a_plan_over_several_devices_is_still_refused(rig_devices, tmp_path):
    if pytest.importorskip("diffusers").__version__ < "0.33":
        pytest.skip("diffusers has quanto since 0.33")
    # Diffusers refuses an older one before it looks at the plan.
    if sentence := unmet("optimum-quanto>=0.2.6"):
        pytest.skip(sentence)
    models.flux_transformer(num_layers=3, num_single_layers=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="currently not supported with Diffusers and the Quanto backend"):
        load(tmp_path, device_map="auto", max_memory={0: 300_000, 1: 600_000})


@pytest.mark.defect(STRING, shows=NOT_IN_STRING, needs=NEEDS)
def test_modules_that_are_not_converted_stay_that(gpu, folder):
    """With a name in the list there is no None; without, the config of the caller is not changed."""
    import diffusers
    import torch

    config = diffusers.QuantoConfig(weights_dtype="int8", modules_to_not_convert=["proj_out"])
    model = diffusers.FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=config, torch_dtype=torch.float16, device_map="auto"
    )
    assert type(model.proj_out) is torch.nn.Linear
    assert type(load(folder, device_map="auto").proj_out) is not torch.nn.Linear


@pytest.mark.parametrize("weights", ["int8", "float8"])
@pytest.mark.parametrize("device_map", ONE_DEVICE, ids=str)
@pytest.mark.defect(WARM_UP, shows=NOT_FOUND, needs=NEEDS)
def test_a_saved_model_on_one_device(gpu, folder, tmp_path, device_map, weights):
    import torch

    # Quantized on the CPU: on a GPU quanto 0.2.6 packs float8 weights with code that it compiles (quanto-fp8-plain).
    model = load(folder, weights=weights, device_map={"": "cpu"})
    model.save_pretrained(tmp_path)
    again = load(tmp_path, quantize=False, device_map=device_map)
    expected = "cuda:1" if "1" in str(device_map) else "cuda:0"
    assert {str(parameter.device) for parameter in again.parameters()} == {expected}
    assert torch.equal(run(again), run(model.to("cuda:0")))


@pytest.mark.defect(WARM_UP, shows=NOT_FOUND, needs=NEEDS)
@pytest.mark.defect(STRING, shows=NOT_IN_STRING, needs=NEEDS)
def test_a_saved_model_and_a_plan(gpu, folder, tmp_path):
    import torch

    model = load(folder, device_map={"": "cuda:0"})
    model.save_pretrained(tmp_path)
    assert torch.equal(run(load(tmp_path, quantize=False, device_map="auto")), run(model))


def test_another_checkpoint_is_warmed_up_whole():
    """A name that is missing in a model of any other kind stays upstream's error."""
    import torch

    loading = pytest.importorskip("diffusers.models.model_loading_utils")
    if not hasattr(loading, "_caching_allocator_warmup"):
        pytest.skip("came with diffusers 0.35")
    with pytest.raises(AttributeError, match="not found in model"):
        loading._caching_allocator_warmup(
            torch.nn.Module(), {"weight._data": torch.device("meta")}, torch.float32, None
        )
