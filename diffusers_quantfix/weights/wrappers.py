"""Wrappers: optimum-quanto and torchao weights, tensor subclasses around inner tensors that hold the bytes.

Assigning ``.data`` replaces the wrapper only, and a wrapper has its own ``device``. Neither library is imported here.

Upstream: optimum/quanto/tensor/qtensor.py (``QTensor``), torchao/utils.py (``TorchAOBaseTensor``).
"""

from __future__ import annotations

import sys

from ..engine.classes import class_name, defines, lasts, mro, package_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = [
    "BACKENDS",
    "WITH_WRAPPERS",
    "backend_of",
    "follow",
    "following",
    "has_no_address",
    "inner_places",
    "is_torn_by_a_map",
    "is_wrapper",
    "put_together",
    "shell",
    "taken_apart",
    "with_inner",
]

WITH_WRAPPERS = ("optimum", "torchao")
BACKENDS = ("bitsandbytes", "gguf", *WITH_WRAPPERS)
_known_types: dict[type, str] = {}
_are_wrappers: dict[type, bool] = {}
# Attribute names, class and attribute types of a wrapper -> the names of its inner tensors. ``__tensor_flatten__``
# returns them too, but serializes the whole metadata each time.
_inner_names: dict[tuple[Any, ...], tuple[str, ...]] = {}
_MOST_LAYOUTS = 10_000


def backend_of(tensor: Any) -> str:
    """The package of a quantized weight's class, "gguf" for diffusers' GGUF weights; "" for every other tensor."""
    kind = type(tensor)
    known = _known_types.get(kind)
    if known is None:
        packages = [_backend_of_class(cls) for cls in mro(kind)]
        known = next((name for name in packages if name in BACKENDS), "")
        if lasts(kind):
            _known_types[kind] = known
    return known


def _backend_of_class(cls: type) -> str:
    package = package_name(cls)
    return "gguf" if package == "diffusers" and class_name(cls) == "GGUFParameter" else package


def has_no_address(id_tensor_storage: Callable[[Any], Any]) -> bool:
    """Whether accelerate's ``id_tensor_storage`` raises for a wrapper, whose data has no address; for probes."""
    import torch

    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (1,))

        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            return NotImplemented

        def storage(self) -> Any:  # tried next; torch's version has no address either, and warns
            return self.untyped_storage()

    try:
        id_tensor_storage(Wrapper())
    except RuntimeError:
        return True
    return False


def is_wrapper(tensor: Any) -> bool:
    """Whether ``tensor`` is a wrapper of one of these libraries."""
    kind = type(tensor)
    known = _are_wrappers.get(kind)
    if known is None:
        known = backend_of(tensor) in WITH_WRAPPERS and defines(kind, "__tensor_flatten__")
        if lasts(kind):
            _are_wrappers[kind] = known
    return known


def inner_places(wrapper: Any) -> list[tuple[Any, str]]:
    """The places of the inner tensors of ``wrapper`` and of nested wrappers: (holder, attribute)."""
    found = []
    for name, inner in _inner_tensors(wrapper):
        found += inner_places(inner) if is_wrapper(inner) else [(wrapper, name)]
    return found


def with_inner(wrapper: Any) -> list[Any]:
    """The wrappers nested in ``wrapper``, and then ``wrapper``, without those that have no inner tensors."""
    inner = _inner_tensors(wrapper)
    found = [one for _, tensor in inner if is_wrapper(tensor) for one in with_inner(tensor)]
    return [*found, wrapper] if inner else found


def follow(wrapper: Any) -> None:
    """Set the ``device`` of ``wrapper`` to that of its inner tensors."""
    torch = sys.modules["torch"]
    # The class would handle each read of a size or device in Python, with the same result.
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_inference_mode_enabled():
            # Inside it, torch asks the class whether it accepts the new data, and the class reads the shell.
            with torch.inference_mode(False):
                _follow(wrapper)
        else:
            _follow(wrapper)


def _follow(wrapper: Any) -> None:
    inner = [tensor for _, tensor in _inner_tensors(wrapper)]
    for tensor in inner:
        if is_wrapper(tensor):
            _follow(tensor)
    if inner and wrapper.device != (device := inner[0].device):
        wrapper.data = shell(wrapper, device)


def shell(wrapper: Any, device: Any) -> Any:
    """An empty wrapper on ``device`` to assign to ``wrapper.data``. Call it with tensor subclasses disabled.

    It has no inner tensors and is built without its class, which may refuse the CPU, where its kernel does not run.
    """
    return sys.modules["torch"].Tensor._make_wrapper_subclass(
        type(wrapper),
        wrapper.size(),
        strides=wrapper.stride(),
        storage_offset=wrapper.storage_offset(),
        dtype=wrapper.dtype,
        device=device,
    )


def taken_apart(weight: Any) -> tuple[Any, tuple[Any, ...]]:
    """Take ``weight`` apart for `put_together`: its metadata, and all inner tensors, also of nested wrappers.

    The inner tensors are not copied; their order depends only on the class. Nothing in the result is of a class of this
    package, so that it can be copied and pickled. For a plain tensor: None, and the detached tensor.
    """
    tensors: list[Any] = []
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        return _without_tensors(weight, tensors), tuple(tensors)


def _without_tensors(weight: Any, tensors: list[Any]) -> dict[str, Any] | None:
    if not is_wrapper(weight):
        tensors.append(weight.detach())
        return None
    inner = _inner_tensors(weight)
    names = [name for name, _ in inner]
    return {
        "type": type(weight),
        "size": tuple(weight.size()),
        "strides": tuple(weight.stride()),
        "storage_offset": weight.storage_offset(),
        "dtype": weight.dtype,
        "attributes": {name: value for name, value in vars(weight).items() if name not in names},
        "inner": {name: _without_tensors(tensor, tensors) for name, tensor in inner},
    }


def put_together(made: Any, tensors: tuple[Any, ...], requires_grad: bool = False) -> Any:
    """Rebuild the weight from the results of `taken_apart`, on the device of ``tensors``; a parameter if it was one.

    It does not call the class, which may refuse the CPU, where its kernel does not run.
    """
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        return _with_tensors(made, iter(tensors), requires_grad)


def _with_tensors(made: dict[str, Any] | None, tensors: Iterator[Any], requires_grad: bool) -> Any:
    if made is None:
        return next(tensors)
    inner = {name: _with_tensors(part, tensors, False) for name, part in made["inner"].items()}
    weight = sys.modules["torch"].Tensor._make_wrapper_subclass(
        made["type"],
        made["size"],
        strides=made["strides"],
        storage_offset=made["storage_offset"],
        dtype=made["dtype"],
        device=next(iter(inner.values())).device,
        requires_grad=requires_grad,
    )
    vars(weight).update(made["attributes"], **inner)
    return weight


def following(setstate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``__setstate__`` of a wrapper class: the wrapper then has the device of its inner tensors."""

    def __setstate__(self: Any, state: Any) -> None:
        setstate(self, state)
        if not any(tensor.is_meta for _, tensor in _inner_tensors(self)):  # torch does not accept such data
            follow(self)

    return __setstate__


def is_torn_by_a_map() -> bool:
    """Whether ``torch.load`` with a dict as ``map_location`` leaves a wrapper on two devices; for probes.

    torch looks up the storage's device by its name, but a wrapper's by ``torch.device``, which does not match.
    """
    torch = sys.modules["torch"]
    look_up, loading = torch._utils._get_restore_location, torch.serialization._serialization_tls
    before, loading.map_location = loading.map_location, {"cpu": "meta"}
    try:
        return bool(look_up(torch.device("cpu")) == torch.device("cpu"))
    finally:
        loading.map_location = before


def _inner_tensors(wrapper: Any) -> list[tuple[str, Any]]:
    held = vars(wrapper)
    kinds = type(wrapper), *map(type, held.values())
    key = *held, *kinds
    names = _inner_names.get(key)
    if names is None:
        if len(_inner_names) >= _MOST_LAYOUTS:
            _inner_names.clear()
        names = tuple(wrapper.__tensor_flatten__()[0])
        if all(map(lasts, kinds)):
            _inner_names[key] = names
    found = [(name, getattr(wrapper, name)) for name in names]
    return [(name, inner) for name, inner in found if inner is not None]
