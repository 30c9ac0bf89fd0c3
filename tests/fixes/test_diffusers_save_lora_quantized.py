"""diffusers-save-lora-quantized: save_lora_adapter of a quantized model."""

from __future__ import annotations

import pytest

from tests.fixes import casts, four_bit, lora_models
from tests.fixes.offloaded import offload
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-save-lora-quantized"
SHOWS = r"Casting a quantized model to a new `dtype`|`\.to` is not supported for `8-bit`"
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.32")), reason="models have had save_lora_adapter since 0.32.0"
)
FILE = "pytorch_lora_weights.safetensors"
backends = pytest.mark.parametrize("backend", ["nf4", "int8", "gguf", "torchao", "quanto"])


def made(backend, folder):
    """A pipeline with a quantized transformer and a LoRA."""
    from diffusers import FluxTransformer2DModel

    if backend in ("nf4", "int8"):
        bits = 4 if backend == "nf4" else 8
        lora_models.skip_where_flux_takes_no_lora(bits)
        models.saved(models.flux_transformer(), folder)
        model = four_bit.load(FluxTransformer2DModel, folder, bits=bits)
    else:
        model = casts.loaded(backend, folder)
    pipe = models.flux_pipeline(model)
    try:
        pipe.load_lora_weights(lora_models.weights(), adapter_name="one")
    except (
        ImportError,
        NotImplementedError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        KeyError,
    ) as error:
        pytest.skip(f"this release loads no LoRA into these weights: {error}")
    return pipe


def saved(model, folder, **options):
    from safetensors.torch import load_file

    model.save_lora_adapter(folder, adapter_name="one", **options)
    return load_file(folder / FILE)


def expected() -> dict:
    return {name.partition(".")[2]: tensor for name, tensor in lora_models.weights().items()}


@backends
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_saved(gpu, tmp_path, backend):
    import torch

    pipe = made(backend, tmp_path / "whole")
    dtype = pipe.transformer.dtype
    found, wanted = saved(pipe.transformer, tmp_path / "lora"), expected()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
    assert pipe.transformer.dtype == dtype


@backends
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_saved_in_float32(gpu, tmp_path, backend):
    """And the model stays what it is: upstream casts a plain model for good."""
    import torch

    pipe = made(backend, tmp_path / "whole")
    if backend != "int8":
        for name, parameter in pipe.transformer.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.bfloat16()
    before = {name: (one.dtype, id(one)) for name, one in pipe.transformer.named_parameters()}
    found = saved(pipe.transformer, tmp_path / "lora", upcast_before_saving=True)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert found.keys() == expected().keys()
    assert {name: (one.dtype, id(one)) for name, one in pipe.transformer.named_parameters()} == before


def test_one_step_further(gpu, tmp_path):
    """Of an offloaded model, without safetensors, interrupted, and loaded into another model."""
    import torch

    pipe = made("nf4", tmp_path / "whole")
    here = gpu.devices[0]
    reference = lora_models.run(pipe, here, torch.float16)
    offload(pipe.transformer, device=here)
    with pytest.raises(ValueError, match="not found"):
        pipe.transformer.save_lora_adapter(tmp_path / "lora", adapter_name="two")
    found = saved(pipe.transformer, tmp_path / "lora")
    assert not any(tensor.is_meta for tensor in found.values())
    pipe.transformer.save_lora_adapter(tmp_path / "lora", "one", True, False)
    assert (tmp_path / "lora" / "pytorch_lora_weights.bin").exists()
    assert torch.equal(lora_models.run(pipe, here, torch.float16), reference)
    again = made("nf4", tmp_path / "again")
    again.unload_lora_weights()
    again.transformer.load_lora_adapter(tmp_path / "lora", prefix=None, weight_name=FILE, adapter_name="one")
    assert torch.equal(lora_models.run(again, here, torch.float16), reference)


def test_a_plain_model_is_upstreams(tmp_path):
    import torch

    pipe = models.flux_pipeline(models.flux_transformer().bfloat16())
    pipe.load_lora_weights(lora_models.weights(), adapter_name="one")
    assert {t.dtype for t in saved(pipe.transformer, tmp_path).values()} == {torch.bfloat16}
    saved(pipe.transformer, tmp_path, upcast_before_saving=True)
    assert pipe.transformer.dtype == torch.float32
