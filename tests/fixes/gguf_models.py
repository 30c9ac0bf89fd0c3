"""GGUF transformers for tests."""

from __future__ import annotations

from unittest import mock

import pytest

from diffusers_quantfix.verify.case import CannotReproduce
from diffusers_quantfix.verify.models import gguf_model
from tests.rig import models


def transformer(folder, **options):
    """The transformer that verify writes and loads; skips where these releases have none."""
    try:
        return gguf_model.flux(str(folder), **options)
    except CannotReproduce as reason:
        pytest.skip(str(reason))


def run(transformer, device="cpu"):
    """The latents of one run of a Flux pipeline with ``transformer``, on the CPU."""
    import torch

    return models.call_flux(models.flux_pipeline(transformer), device=device, dtype=torch.float32).cpu()


def weights_of(model) -> list:
    """The GGUF weights of a model."""
    return [parameter for parameter in model.parameters() if type(parameter).__name__ == "GGUFParameter"]


def packed(model, folder, kind: str, rest: str, dtype=None):
    """``model``, a transformer of diffusers, written to a GGUF file and loaded from it.

    Its Linear weights are packed as ``kind``; every other tensor as ``rest``, if that can pack its last dimension.
    """
    import diffusers
    import torch

    gguf = pytest.importorskip("gguf")
    if not hasattr(diffusers, "GGUFQuantizationConfig"):
        pytest.skip("this diffusers reads no GGUF files")
    from diffusers.loaders import single_file_model

    folder.mkdir(exist_ok=True)
    model.save_config(folder)
    linear = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    writer = gguf.GGUFWriter(folder / "model.gguf", "test")
    for name, tensor in model.state_dict().items():
        chosen = gguf.GGMLQuantizationType[kind if name in linear else rest]
        block = gguf.GGML_QUANT_SIZES[chosen][0]
        values = tensor.float().numpy()
        if chosen == gguf.GGMLQuantizationType.F32 or values.shape[-1] % block:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # diffusers before 0.35 takes every file for one in the format of the original authors.
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[type(model).__name__]
    dtype = dtype or torch.float32
    with mock.patch.dict(entry, checkpoint_mapping_fn=lambda checkpoint, **_: checkpoint):
        return (
            type(model)
            .from_single_file(
                str(folder / "model.gguf"),
                config=str(folder),
                quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
                torch_dtype=dtype,
            )
            .eval()
        )


def wan(folder, dtype, unpacked: str = "", kind: str = "Q4_0"):
    """A WanTransformer3DModel of one block, its linear layers packed as ``kind`` in the file: those in ``unpacked`` in
    float32, with the numbers that diffusers dequantizes."""
    import diffusers
    from diffusers.loaders import single_file_model

    folder.mkdir(exist_ok=True)
    file = folder / "model.gguf"
    if not file.exists():
        _write_wan(folder, file, unpacked, kind)
    # diffusers before 0.35 takes every file for one in the format of the original authors.
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["WanTransformer3DModel"]
    with mock.patch.dict(entry, checkpoint_mapping_fn=lambda checkpoint, **_: checkpoint):
        return diffusers.WanTransformer3DModel.from_single_file(
            str(file),
            config=str(folder),
            quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
            torch_dtype=dtype,
        ).eval()


def wan_model():
    """A WanTransformer3DModel of one block."""
    import diffusers
    import torch

    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=128,
        num_layers=1,
        rope_max_seq_len=32,
    )


def _write_wan(folder, file, unpacked: str, kind: str) -> None:
    import torch

    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    model = wan_model()
    model.save_config(folder)
    linear = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    packed = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "wan")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name not in linear:
            writer.add_tensor(name, values)
            continue
        values = gguf.quants.quantize(values, packed)
        if unpacked and unpacked in name.split("."):
            weight = dequantize_gguf_tensor(GGUFParameter(torch.from_numpy(values), quant_type=packed))
            writer.add_tensor(name, weight.float().numpy())
        else:
            writer.add_tensor(name, values, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_wan(model, device="cpu"):
    """The output of one call, on the CPU."""
    import torch

    random, dtype = torch.Generator().manual_seed(1), model.patch_embedding.bias.dtype
    with torch.no_grad():
        return model(
            hidden_states=torch.randn(1, 4, 1, 8, 8, generator=random).to(device, dtype),
            timestep=torch.tensor([3.0], device=device),
            encoder_hidden_states=torch.randn(1, 8, 64, generator=random).to(device, dtype),
        ).sample.cpu()
