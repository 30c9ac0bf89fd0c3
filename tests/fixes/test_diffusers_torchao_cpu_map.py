"""diffusers-torchao-cpu-map: torchao with a device map that has the CPU alone."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import flux
from tests.fixes import torchao_models as ao
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-torchao-cpu-map"
SHOWS = r"is not quantized|is not serializable|cpu/disk offload with a pre-quantized torchao model"
CPU_MAPS = ("auto", "of-one", "of-parts")
PARTS = (
    "pos_embed", "time_text_embed", "context_embedder", "x_embedder", "transformer_blocks",
    "single_transformer_blocks", "norm_out", "proj_out",
)  # fmt: skip
pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.36")), reason="before diffusers 0.36 torchao's configurations ask for a GPU"
)


def of(kind: str):
    import torch

    if kind == "auto":
        if torch.cuda.is_available():
            pytest.skip("the GPU is in this map")
        return "auto"
    if kind == "of-one":
        return {"": "cpu"}
    return dict.fromkeys(PARTS, "cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return models.saved(flux.transformer(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def checkpoint(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    load(plain, None).save_pretrained(folder, safe_serialization=False)
    return folder


def load(folder, device_map, quantize=True):
    import diffusers
    import torch

    more = {"quantization_config": diffusers.TorchAoConfig(ao.config("int8"))} if quantize else {}
    return diffusers.FluxTransformer2DModel.from_pretrained(
        folder, torch_dtype=torch.bfloat16, device_map=device_map, use_safetensors=quantize, **more
    )


def is_quantized(weight) -> bool:
    return hasattr(weight.data, "__tensor_flatten__")


def run(model):
    import torch

    with torch.no_grad():
        return model(**{name: value.bfloat16() for name, value in flux.inputs().items()}).sample


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("kind", CPU_MAPS)
@pytest.mark.parametrize("quantize", [True, False], ids=["plain", "checkpoint"])
def test_a_map_of_the_cpu_alone(plain, checkpoint, kind, quantize):
    import torch

    folder = plain if quantize else checkpoint
    model, reference = load(folder, of(kind), quantize), load(folder, None, quantize)
    for name, weight in reference.named_parameters():
        if is_quantized(weight):
            assert is_quantized(model.get_parameter(name)), f"{name} is not quantized"
    assert torch.equal(run(model), run(reference))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("kind", CPU_MAPS[1:])
def test_it_is_saved_and_loaded(plain, tmp_path, kind):
    import torch

    model = load(plain, of(kind))
    model.save_pretrained(tmp_path, safe_serialization=False)
    again = load(tmp_path, of(kind), quantize=False)
    assert is_quantized(again.proj_out.weight), "the output layer is not quantized"
    assert torch.equal(run(again), run(model))


def test_a_map_that_offloads_is_left_to_diffusers(gpu, plain, checkpoint):
    places = {**dict.fromkeys(PARTS, gpu.devices[0]), "proj_out": "cpu"}
    model = load(plain, places)
    assert is_quantized(model.x_embedder.weight)
    assert not is_quantized(model.proj_out.weight)
    with pytest.raises(ValueError, match="cpu/disk offload with a pre-quantized torchao model"):
        load(checkpoint, places, quantize=False)


def test_the_map_of_the_caller_is_not_changed(plain):
    places = {"": "cpu"}
    model = load(plain, places)
    assert places == {"": "cpu"}
    assert dict(model.hf_device_map) == places
