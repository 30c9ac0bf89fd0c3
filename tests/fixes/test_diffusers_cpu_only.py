"""diffusers-cpu-only: bitsandbytes models of diffusers on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.rig import models

FIX_ID = "diffusers-cpu-only"
SHOWS = r"No GPU found|dispatched on the CPU|not compiled with CUDA|NVIDIA driver"
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    path = tmp_path_factory.mktemp("plain")
    models.flux_transformer().save_pretrained(path)
    return path


def load(folder, device_map=None, dtype=None, **options):
    """``from_pretrained`` on the CPU; ``options`` are those of BitsAndBytesConfig, none for a saved model."""
    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    config = {"quantization_config": BitsAndBytesConfig(**options)} if options else {}
    placement = {} if device_map is None else {"device_map": device_map}
    model = FluxTransformer2DModel.from_pretrained(
        folder, torch_dtype=dtype or torch.float32, **config, **placement
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return model


def run(model):
    import torch

    return models.call_flux(models.flux_pipeline(model), device="cpu", dtype=torch.float32)


def error(model, folder) -> float:
    """How far a run of ``model`` is from that of the model that was not quantized, relative."""
    from diffusers import FluxTransformer2DModel

    reference = run(FluxTransformer2DModel.from_pretrained(folder))
    return float((run(model) - reference).norm() / reference.norm())


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
@pytest.mark.parametrize(
    ("options", "bound"), [(NF4, 0.2), ({"load_in_8bit": True}, 0.02)], ids=["4bit", "8bit"]
)
def test_it_loads_and_runs(folder, tmp_path, options, bound):
    import torch

    extra = {"bnb_4bit_compute_dtype": torch.float32} if "load_in_4bit" in options else {}
    model = load(folder, **options, **extra)
    model.save_pretrained(tmp_path)
    assert 0 < error(model, folder) < bound
    assert 0 < error(load(tmp_path), folder) < bound


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("bitsandbytes>=0.46", "diffusers>=0.33"))
def test_the_cpu_by_name(folder):
    load(folder, device_map="cpu", **NF4)
    load(folder, device_map={"": "cpu"}, load_in_8bit=True)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
@pytest.mark.parametrize("options", [NF4, {"load_in_8bit": True}], ids=["4bit", "8bit"])
def test_it_is_dequantized_where_it_is(folder, options):
    import torch

    if "load_in_8bit" in options:
        diffusers = pytest.importorskip("diffusers")
        if diffusers.__version__.startswith(("0.31", "0.32")):
            pytest.skip(
                "this diffusers dequantizes 8-bit models with functions that bitsandbytes 0.46 dropped"
            )
    model = load(folder, **options)
    model.dequantize()
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    assert 0 < error(model.float() if model.dtype != torch.float32 else model, folder) < 0.2


def test_what_has_no_kernel_is_refused_at_once(folder):
    from packaging.version import Version

    bitsandbytes = pytest.importorskip("bitsandbytes")
    version = Version(bitsandbytes.__version__)
    if version >= Version("0.47"):
        load(folder, load_in_4bit=True, bnb_4bit_quant_type="fp4")
        return
    said = "no fp4 on the CPU" if version >= Version("0.46") else "No GPU found"
    with pytest.raises((ValueError, RuntimeError), match=said):
        load(folder, load_in_4bit=True, bnb_4bit_quant_type="fp4")


def test_a_machine_with_a_gpu_uses_it(gpu, folder):
    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**NF4), torch_dtype=torch.float16
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
