"""diffusers-4bit-storage: a saved 4-bit model whose bytes are stored as a float dtype cannot be loaded."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "diffusers-4bit-storage"
SHOWS = r"Expected the flattened shape of the current param|Cannot load .* expected shape|not supported for quantized"
STORAGES = ("uint8", "bfloat16", "float16", "float32")


def saved(folder, storage: str, double_quant: bool = False, **options):
    """A Flux transformer in nf4, and the folder with it."""
    import torch
    from diffusers import FluxTransformer2DModel

    models.flux_transformer().save_pretrained(folder / "plain")
    model = four_bit.load(
        FluxTransformer2DModel,
        folder / "plain",
        bnb_4bit_quant_storage=getattr(torch, storage),
        bnb_4bit_use_double_quant=double_quant,
    )
    model.save_pretrained(folder / "saved", **options)
    return model, folder / "saved"


def bits(model) -> dict:
    """Packed bytes may look like NaN, which differs from itself."""
    import torch

    return {
        name: tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        for name, tensor in model.state_dict().items()
    }


def run(model, dtype: str = "float16"):
    """Its output; None where the CPU kernel behind the rig takes bytes in uint8 only (bitsandbytes before 0.47)."""
    import torch

    inputs = getattr(torch, dtype)
    try:
        return models.call_flux(models.flux_pipeline(model), dtype=inputs).to("cpu", torch.float32)
    except RuntimeError as error:
        if "only supports uint8 storage" not in str(error):
            raise
        return None


@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
@pytest.mark.parametrize("storage", STORAGES[1:])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_loaded_bit_by_bit(gpu, tmp_path, storage, double_quant):
    import torch
    from diffusers import FluxTransformer2DModel

    model, folder = saved(tmp_path, storage, double_quant)
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float16)
    four_bit.assert_whole(again, gpu.devices[0])
    weights = [layer.weight for layer in four_bit.layers_of(again)]
    assert {weight.dtype for weight in weights} == {getattr(torch, storage)}
    assert {weight.quant_storage for weight in weights} == {getattr(torch, storage)}
    assert not four_bit.differences(bits(model), bits(again))
    # In older releases the model takes the dtype of its packed bytes for its own, and cannot run, saved or not.
    before = run(model) if model.dtype == torch.float16 else None
    if before is not None:
        assert torch.equal(run(again), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_another_dtype_is_for_the_other_weights(gpu, tmp_path, dtype):
    """The packed bytes must not be converted to it."""
    import torch
    from diffusers import FluxTransformer2DModel

    model, folder = saved(tmp_path, "float16")
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
    expected = {name: value for name, value in bits(model).items() if ".absmax" in name or ".quant_" in name}
    found = bits(again)
    for layer_name, layer in model.named_modules():
        if type(layer).__name__ == "Linear4bit":
            expected[f"{layer_name}.weight"] = bits(model)[f"{layer_name}.weight"]
    assert expected and not [name for name in expected if not torch.equal(expected[name], found[name])]
    after = run(again, dtype) if again.dtype == getattr(torch, dtype) else None
    if after is not None:
        assert torch.isfinite(after).all()


@pytest.mark.parametrize("device_map", ["cuda:1", 1, {"": "cuda:1"}, "auto"], ids=str)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
def test_every_spelling_of_a_device_map(gpu, tmp_path, device_map):
    import torch
    from diffusers import FluxTransformer2DModel

    model, folder = saved(tmp_path, "bfloat16")
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float16, device_map=device_map)
    if device_map != "auto":
        four_bit.assert_whole(again, "cuda:1")
    assert not four_bit.differences(bits(model), bits(again))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_checkpoint_in_several_files(gpu, tmp_path):
    """Where a file may end between a weight and its quant state (diffusers-sharded-companions)."""
    import torch
    from diffusers import FluxTransformer2DModel

    model, folder = saved(tmp_path, "bfloat16", max_shard_size="20KB")
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float16)
    assert not four_bit.differences(bits(model), bits(again))


def test_what_is_loaded_can_be_saved_again(gpu, tmp_path):
    import torch
    from diffusers import FluxTransformer2DModel

    model, folder = saved(tmp_path, "bfloat16")
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float16)
    again.save_pretrained(tmp_path / "again")
    last = FluxTransformer2DModel.from_pretrained(tmp_path / "again", torch_dtype=torch.float16)
    assert not four_bit.differences(bits(model), bits(last))


def test_bytes_are_loaded_as_before(gpu, tmp_path):
    import torch
    from diffusers import FluxTransformer2DModel

    model, folder = saved(tmp_path, "uint8")
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float16)
    assert not four_bit.differences(bits(model), bits(again))
