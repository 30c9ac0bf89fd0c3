"""Groups of diffusers' group offloading that are offloaded to disk: their tensors are a private mapping of a file.

The system can reclaim all memory of a mapping; otherwise a mapped tensor is an ordinary CPU tensor that can be read,
saved and changed. Changed pages (a LoRA is fused, swapped or trained, or a layer writes to its buffer) stay in memory
from then on. The file does not change, and no other group sees the change.

A file is complete before it gets the name that diffusers has for it. A group reuses an existing file, of an earlier
process or of another model, if every byte is equal; otherwise it writes its own file, without a name.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup._offload_to_disk``).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from ..engine.interruptions import heed_interruption
from .group_tensors import FILE, companions_of_parameters, contents, refuse_wrappers, rejoin, wrappers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["check_file", "delete_own_file", "is_mapped", "map_to_disk"]

_CHANGED = (
    "{} was changed by another program while weights were offloaded to it. Load the model again, with another "
    "`offload_to_disk_path`."
)


class _File:
    """The file of a group.

    Attributes:
        path: its path; None if its name was removed.
        identity: device, inode, size and time of the last change.
        is_own: whether the group wrote it.
    """

    def __init__(self, path: str | None, identity: tuple[int, ...], is_own: bool) -> None:
        self.path = path
        self.identity = identity
        self.is_own = is_own


def is_mapped(group: Any) -> bool:
    """Whether `map_to_disk` has been called for ``group``, which is then on disk whenever it is not in use."""
    return FILE in vars(group)


def map_to_disk(group: Any) -> None:
    """Replace the data of the parameters and buffers of ``group``, on any device, by a mapping of a file.

    Raises:
        ValueError: a weight is of a class that safetensors cannot store.
        OSError, safetensors.SafetensorError: the file cannot be written. The group is unchanged.
    """
    from safetensors.torch import save_file

    torch = sys.modules["torch"]
    refuse_wrappers(wrappers(group, contents(group)[1]))
    aliases = companions_of_parameters(group)
    path = os.path.abspath(group.safetensors_file_path)
    with torch.inference_mode(False), torch.no_grad():
        tensors = {key: tensor.data.to("cpu") for tensor, key in group.tensor_to_key.items()}
        kinds = {key: tensor.is_inference() for tensor, key in group.tensor_to_key.items()}
        mapped = _mapped(path, tensors, kinds)
        if mapped is not None and _are_equal(mapped, tensors):
            file = _File(path, _identity(path), is_own=False)
        else:
            folder = os.path.dirname(path)
            if not os.path.exists(folder):
                os.makedirs(folder, exist_ok=True)
            elif not os.path.isdir(
                folder
            ):  # before anything is written; the probe of the fix passes such a path
                raise NotADirectoryError(f"{folder} is not a folder: groups cannot be offloaded to it")
            own = f"{path}.{os.getpid()}-{os.urandom(4).hex()}"
            try:
                save_file(tensors, own)
                mapped = _mapped(own, tensors, kinds)
                if mapped is None:
                    raise OSError(f"{own} is not what was written to it")
                file = _File(*_named(own, path), is_own=True)
            except BaseException:
                _remove(own)
                raise
        for tensor, key in group.tensor_to_key.items():
            tensor.data = mapped[key]
        group._quantfix_aliases = aliases
        rejoin(group)
    group._is_offloaded_to_disk = True
    vars(group)[FILE] = file


def check_file(group: Any) -> None:
    """Check the file of ``group`` before its mapping is read.

    Raises:
        RuntimeError: another program has written to the file.
    """
    file: _File = vars(group)[FILE]
    if file.path is None:
        return
    try:
        now = _identity(file.path)
    except OSError:  # deleted: the mapping keeps the contents
        return
    if now[:2] == file.identity[:2] and now != file.identity:
        raise RuntimeError(_CHANGED.format(file.path))


def delete_own_file(group: Any) -> None:
    """Delete the file of ``group`` if the group wrote it; its modules are ordinary modules from then on."""
    file: _File | None = vars(group).pop(FILE, None)
    if file is None or file.path is None or not file.is_own:
        return
    if os.name == "nt":  # which cannot delete a mapped file
        for tensor in group.tensor_to_key:
            tensor.data = tensor.data.clone()
        rejoin(group)
    with contextlib.suppress(OSError):
        if _identity(file.path)[:2] == file.identity[:2]:
            _remove(file.path)


# ---------------------------------------------------------------------- files


def _named(own: str, path: str) -> tuple[str | None, tuple[int, ...]]:
    """Rename the file ``own`` to ``path`` if that is free, else unlink it: it lasts as long as its mappings.

    Returns:
        Its path, or None if it has none, and its `_identity`.
    """
    identity = _identity(own)
    try:
        os.link(own, path)
    except OSError:
        path = own
        if os.name == "nt":
            return own, identity
    _remove(own)
    return (None if path == own else path), identity


def _identity(path: str) -> tuple[int, ...]:
    known = os.stat(path)
    return known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


def _mapped(path: str, tensors: dict[str, Any], kinds: dict[str, bool]) -> dict[str, Any] | None:
    """The tensors of a private, writable mapping of the file at ``path``; None if the file does not match.

    Args:
        path: the file, which may not exist.
        tensors: what it must hold: names, dtypes and shapes.
        kinds: which of them are to be inference tensors: a parameter that gets data of the other kind can never be
            viewed, or differentiated, again.
    """
    import mmap

    torch = sys.modules["torch"]
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8:start])
        header.pop("__metadata__", None)
        found = {}
        for key, tensor in tensors.items():
            said = header.pop(key)
            begin, end = (start + offset for offset in said["data_offsets"])
            if said["shape"] != list(tensor.shape) or end - begin != tensor.nbytes or end > len(memory):
                return None
            with torch.inference_mode(kinds[key]):
                found[key] = (
                    torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
                    if tensor.numel()
                    else torch.empty(0, dtype=tensor.dtype)
                ).view(tensor.shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        heed_interruption(error)
        return None
    return None if header else found


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    torch = sys.modules["torch"]
    return all(
        other[key].is_contiguous() and torch.equal(_bytes(tensor), _bytes(other[key]))
        for key, tensor in one.items()
    )


def _bytes(tensor: Any) -> Any:
    return tensor.reshape(-1).view(sys.modules["torch"].uint8)
