"""Denoisers as GGUF files, written here, and loaded the way that diffusers has for them: ``from_single_file``."""

from __future__ import annotations

from pathlib import Path

NAME = "model.gguf"


def is_read(kind: type) -> bool:
    """Whether ``from_single_file`` knows this class of models."""
    from diffusers.loaders import single_file_model

    known = set(single_file_model.SINGLE_FILE_LOADABLE_CLASSES)
    return hasattr(kind, "from_single_file") and any(one.__name__ in known for one in kind.__mro__)


def write(model, folder: Path) -> None:
    """The model with the weights of its linear layers in Q4_0, and its config beside it."""
    import gguf
    import torch

    model.save_config(folder)
    packed = gguf.GGMLQuantizationType.Q4_0
    linear = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    writer = gguf.GGUFWriter(folder / NAME, "diffusers")
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name in linear and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[packed][0] == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, packed), raw_dtype=packed)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(kind: type, folder: Path, dtype):
    import diffusers

    return kind.from_single_file(
        str(folder / NAME),
        config=str(folder),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
        torch_dtype=dtype,
    )
