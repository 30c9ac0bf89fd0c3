"""Loading a torchao checkpoint reads all of its keys for each of its tensors.

Symptom: the time that ``from_pretrained`` takes for a torchao checkpoint in safetensors is quadratic in the number of
    layers in diffusers, and cubic in transformers, before or while anything is loaded.
Cause: ``unflatten_tensor_state_dict`` searches all tensors and all metadata for the parts of each tensor. transformers
    calls it once for each parameter with the metadata of all.
Upstream: https://github.com/pytorch/ao/blob/v0.18.0/torchao/prototype/safetensors/safetensors_support.py#L79; not
    reported.
Patch: the function is called for each tensor that has a part present, with only its parts and its metadata. The names
    of the checkpoint are parsed once, and the result is kept until another checkpoint is read; no tensors are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="torchao-load-scan",
    module="torchao.prototype.safetensors.safetensors_support",
    claims={"torchao": ">=0.15.0,<=0.18.0"},
    harm="memory or time",
)

_FUNCTION = "unflatten_tensor_state_dict"


def broken(safetensors_support: ModuleType) -> bool:
    """Are the names of eight plain tensors compared with each other?"""
    seen = 0

    class Name(str):
        __slots__ = ()

        def startswith(self, *args: Any) -> bool:
            nonlocal seen
            seen += 1
            return super().startswith(*args)

    names = [Name(f"{i}.weight") for i in range(8)]
    metadata: dict[str, str] = dict.fromkeys(names, '{"_type": "Tensor"}')
    metadata["tensor_names"] = "[" + ", ".join(f'"{name}"' for name in names) + "]"
    tensors: dict[str, None] = dict.fromkeys(names)
    resolve(safetensors_support, _FUNCTION)(tensors, metadata)
    return seen > 4 * len(names)


def patch(safetensors_support: ModuleType, draft: Draft) -> None:
    import threading

    last = threading.local()

    def make(original):
        def unflatten_tensor_state_dict(tensors_data_dict, metadata):
            listed = metadata.get("tensor_names")
            if not isinstance(listed, str) or not all(isinstance(key, str) for key in tensors_data_dict):
                return original(tensors_data_dict, metadata)
            # The string itself, not its id, which could later be another string's.
            if getattr(last, "listed", None) is not listed or last.count != len(metadata):
                last.listed = None
                last.names = Names(metadata, original)
                last.count, last.listed = len(metadata), listed
            names = last.names
            if names.unusual:
                return original(tensors_data_dict, metadata)
            result, left = {}, tensors_data_dict.copy()
            for place, keys in names.parts(tensors_data_dict):
                parts = {key: tensors_data_dict[key] for key in keys}
                found, rest = original(parts, names.metadata_of(place, metadata))
                result.update(found)
                for key in parts:
                    if key not in rest:
                        del left[key]
            return result, left

        return unflatten_tensor_state_dict

    draft.wrap_plain(safetensors_support, _FUNCTION, make)


class Names:
    """What a checkpoint's metadata says about the names of its tensors.

    Attributes:
        unusual: whether they are left to torchao itself: it fails, or a tensor is made from metadata alone.
    """

    def __init__(self, metadata: dict[str, Any], unflatten: Callable[..., Any]) -> None:
        import json

        self.names = json.loads(metadata["tensor_names"])
        self.unusual = (
            not isinstance(self.names, list)
            or not all(isinstance(name, str) and "." in name for name in self.names)
            or len(set(self.names)) < len(self.names)
            or not all(isinstance(key, str) for key in metadata)
        )
        if self.unusual:
            return
        self.place = {name: place for place, name in enumerate(self.names)}
        self.of_prefix = {_prefix(name): place for place, name in enumerate(self.names)}
        self.unusual = any(True for key in metadata for _ in self._owners(key)) or any(
            # Raises if torchao does: for a tensor of an unknown kind, a name without metadata.
            unflatten({}, self.metadata_of(place, metadata))[0]
            for place in range(len(self.names))
        )

    def metadata_of(self, place: int, metadata: dict[str, Any]) -> dict[str, Any]:
        """The metadata of one tensor."""
        import json

        name = self.names[place]
        own = {name: metadata[name]} if name in metadata else {}
        return {**own, "tensor_names": json.dumps([name])}

    def parts(self, keys: Any) -> list[tuple[int, list[str]]]:
        """The indices of the names with parts among ``keys``, in order, with these parts."""
        found: dict[int, list[str]] = {}
        for key in keys:
            if key in self.place:
                found.setdefault(self.place[key], []).append(key)
            for place in self._owners(key):
                found.setdefault(place, []).append(key)
        return sorted(found.items())

    def _owners(self, key: str) -> Any:
        """The indices of the names whose parts begin as ``key`` does."""
        end = key.find("_") + 1
        while end:
            place = self.of_prefix.get(key[:end])
            if place is not None:
                yield place
            end = key.find("_", end) + 1


def _prefix(name: str) -> str:
    module, _, weight = name.rpartition(".")
    return f"{module}._{weight}_"
