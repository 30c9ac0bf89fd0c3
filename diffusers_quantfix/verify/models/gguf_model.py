"""A tiny GGUF model for the cases, written to disk and loaded as a user loads it."""

from __future__ import annotations

from ..case import CannotReproduce
from .flux import transformer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def flux(folder: str, compute_dtype: Any = None, plain: list[str] | None = None, rest: str = "F32") -> Any:
    """A FluxTransformer2DModel with two blocks and Q4_0 Linear weights on the CPU, loaded by ``from_single_file``.

    Args:
        folder: where the file is written.
        compute_dtype: the dtype of computations and of unquantized weights; float32 by default.
        plain: the modules that are dequantized during loading.
        rest: the type of all other tensors in the file: "F32" or "BF16".

    Raises:
        CannotReproduce: gguf is not installed, or this diffusers cannot read GGUF files.
    """
    import os
    from unittest import mock

    import diffusers
    import torch

    try:
        import gguf
    except ImportError:
        raise CannotReproduce("needs gguf, which is not installed") from None
    if not hasattr(diffusers, "GGUFQuantizationConfig"):
        raise CannotReproduce(f"diffusers {diffusers.__version__} reads no GGUF files")
    file = os.path.join(folder, "model.gguf")
    if not os.path.exists(file):
        _write(folder, file, gguf, rest)
    from diffusers.loaders import single_file_model

    # diffusers before 0.35 assumes that every file is in the format of the original authors.
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    dtype = compute_dtype or torch.float32
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    if plain:
        config.modules_to_not_convert = plain
    with mock.patch.dict(entry, checkpoint_mapping_fn=lambda checkpoint, **_: checkpoint):
        return diffusers.FluxTransformer2DModel.from_single_file(
            file,
            config=folder,
            quantization_config=config,
            torch_dtype=dtype,
        ).eval()


def _write(folder: str, file: str, gguf: Any, rest: str) -> None:
    model = transformer()
    model.save_config(folder)
    kind = gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(file, "flux")
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        elif rest == "F32":
            writer.add_tensor(name, tensor.numpy())
        else:
            other = gguf.GGMLQuantizationType[rest]
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), other), raw_dtype=other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
