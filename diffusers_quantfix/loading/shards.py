"""A bitsandbytes checkpoint in several files, with a weight and its companions in different files.

``save_pretrained`` splits a checkpoint by size only, and the loaders read one file at a time. The fixes for diffusers
and transformers share these functions: they find, from the file headers, the weights with companions in another file,
and complete the contents of one file. Keys are those in the files.

safetensors and torch are imported inside the functions.
"""

from __future__ import annotations

from ..engine.interruptions import heed_interruption
from .device import is_bitsandbytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Apart", "companions_apart", "look_ahead", "rejoined"]

_SAFE = ".safetensors"
# Name of the weight -> key of the companion -> its file.
Apart = dict[str, dict[str, str]]


def look_ahead(quantizer: Any, files: Any) -> Apart:
    """`companions_apart` for a checkpoint that is about to be loaded; empty if bitsandbytes did not quantize it.

    Args:
        quantizer: the quantizer of diffusers or transformers, or None.
        files: as for `companions_apart`.
    """
    if not is_bitsandbytes(getattr(quantizer, "quantization_config", None)):
        return {}
    if not getattr(quantizer, "pre_quantized", False):
        return {}
    try:
        return companions_apart(files)
    except Exception as error:  # a file that cannot be read: upstream raises the error
        heed_interruption(error)
        return {}


def companions_apart(files: Any) -> Apart:
    """The weights with companions in another file: weight -> key of the companion -> its file.

    Args:
        files: paths; the result is empty unless they are several files of safetensors, or of ``torch.save``. The latter
            are not opened before torch 2.6. A weight with a companion in two of them is left out.
    """
    import os

    if not isinstance(files, (list, tuple)) or len(files) < 2:
        return {}
    if not all(isinstance(file, (str, os.PathLike)) and os.path.isfile(file) for file in files):
        return {}
    paths = [os.fspath(file) for file in files]
    if not any(all(path.endswith(end) for path in paths) for end in (_SAFE, ".bin")):
        return {}
    if not paths[0].endswith(_SAFE) and not _can_read_pickles():
        return {}
    where: dict[str, str] = {}
    twice = set()
    for path in dict.fromkeys(paths):
        for key in _tensors(path, None):
            if key in where:
                twice.add(_weight_of(key))
            where[key] = path
    apart: Apart = {}
    for key, file in where.items():
        weight = _weight_of(key)
        # Nothing says which of two companions is the weight's: upstream's error stays.
        if where.get(weight, file) != file and weight not in twice:
            apart.setdefault(weight, {})[key] = file
    return apart


def _weight_of(key: str) -> str:
    """The weight to which a companion's key in a bitsandbytes checkpoint belongs; "" for any other key."""
    before, _, last = key.rpartition(".")
    if last in ("SCB", "weight_format"):
        return f"{before}.weight"
    if last.startswith("bitsandbytes__"):
        return before.removesuffix(".quant_state")
    return before if last in ("absmax", "quant_map", "nested_absmax", "nested_quant_map") else ""


def rejoined(state_dict: dict[str, Any], apart: Apart) -> dict[str, Any]:
    """``state_dict`` of one file, with the companions of its weights that are in other files.

    Companions of weights in other files are left out: once their weight is loaded, they would be treated as parameters.
    """
    whole = {key: value for key, value in state_dict.items() if key not in apart.get(_weight_of(key), ())}
    wanted: dict[str, list[str]] = {}
    for weight in state_dict:
        for key, file in apart.get(weight, {}).items():
            wanted.setdefault(file, []).append(key)
    for file, keys in wanted.items():  # each is opened once: that reads the whole pickle of a `.bin` file
        whole.update(_tensors(file, keys))
    return whole


def _can_read_pickles() -> bool:
    """Before torch 2.6 a file can run code, even with ``weights_only=True``, and upstream may never open it."""
    import torch

    return bool(torch.__version__ >= (2, 6))


def _tensors(file: str, wanted: list[str] | None) -> dict[str, Any]:
    """The tensors of these names in a file; of None, all names, each with None. Other tensors are not read."""
    if file.endswith(_SAFE):
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            if wanted is None:
                return dict.fromkeys(opened.keys())
            return {key: opened.get_tensor(key) for key in wanted}
    import torch

    opened = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return dict.fromkeys(opened) if wanted is None else {key: opened[key].clone() for key in wanted}
