"""Weights of optimum-quanto and torchao: tensors of a class of their own around inner tensors that have the bytes.

Other ``.data`` exchanges the wrapper only, and a wrapper tells a device of its own. Neither library is imported here.

Upstream: optimum/quanto/tensor/qtensor.py (``QTensor``), torchao/utils.py (``TorchAOBaseTensor``).
"""

from __future__ import annotations

import sys

from ..engine.classes import defines, mro, package_name
from ..engine.probe import written_in

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
BACKENDS = ("bitsandbytes", *WITH_WRAPPERS)
_known_types: dict[type, str] = {}
_are_wrappers: dict[type, bool] = {}
# The class of a wrapper, the names of its attributes and their types -> which of them are its inner tensors. The class
# tells the same, and describes the whole weight in text each time.
_inner_names: dict[tuple[Any, ...], tuple[str, ...]] = {}
_MOST_LAYOUTS = 10_000


def backend_of(tensor: Any) -> str:
    """The package of the class of a quantized weight; empty for every other tensor."""
    kind = type(tensor)
    known = _known_types.get(kind)
    if known is None:
        packages = [package_name(cls) for cls in mro(kind)]
        known = _known_types[kind] = next((name for name in packages if name in BACKENDS), "")
    return known


def has_no_address(id_tensor_storage: Callable[[Any], Any]) -> bool:
    """Whether accelerate's ``id_tensor_storage`` raises for a wrapper, whose data has no address."""
    import torch

    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (1,))

        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            return NotImplemented

        def storage(self) -> Any:  # what it tries next; torch's has no address either, and warns
            return self.untyped_storage()

    try:
        id_tensor_storage(Wrapper())
    except RuntimeError:
        return True
    return False


def is_wrapper(tensor: Any) -> bool:
    """Whether ``tensor`` is a weight of these libraries around inner tensors."""
    kind = type(tensor)
    known = _are_wrappers.get(kind)
    if known is None:
        known = backend_of(tensor) in WITH_WRAPPERS and defines(kind, "__tensor_flatten__")
        _are_wrappers[kind] = known
    return known


def inner_places(wrapper: Any) -> list[tuple[Any, str]]:
    """Where the inner tensors of ``wrapper`` stand, also of wrappers inside of it: the holder and the attribute."""
    found = []
    for name, inner in _inner_tensors(wrapper):
        found += inner_places(inner) if is_wrapper(inner) else [(wrapper, name)]
    return found


def with_inner(wrapper: Any) -> list[Any]:
    """The wrappers inside of ``wrapper``, and then itself; of those that have inner tensors."""
    inner = _inner_tensors(wrapper)
    found = [one for _, tensor in inner if is_wrapper(tensor) for one in with_inner(tensor)]
    return [*found, wrapper] if inner else found


def follow(wrapper: Any) -> None:
    """Let ``wrapper`` tell the device of its inner tensors."""
    torch = sys.modules["torch"]
    # The class would handle each read of a size or a device in Python, to the same result.
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_inference_mode_enabled():
            # In it the class itself is asked whether it takes other data, and reads the shell.
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
    """What to give to ``wrapper.data``, so that it tells ``device``; in a block without tensor subclasses.

    It has no inner tensors: its class may refuse to be built on a CPU, where its kernel does not run.
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
    """What `put_together` makes ``weight`` of: all but its inner tensors, and these, also of wrappers inside of it.

    The inner tensors are its own, in an order that depends on nothing but its class. Nothing in the answer is of a
    class of this package, so that both can be copied and pickled. Of a plain tensor: None, and its data.
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
    """The weight of `taken_apart` again, on the device of ``tensors``, and a parameter if it was one.

    Without its class, which may refuse to be built on a CPU, where its kernel does not run.
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
    """``__setstate__`` of a class of wrappers, after which the wrapper tells the device of its inner tensors."""

    def __setstate__(self: Any, state: Any) -> None:
        setstate(self, state)
        if not any(tensor.is_meta for _, tensor in _inner_tensors(self)):  # torch takes no such data
            follow(self)

    return __setstate__


def is_torn_by_a_map(cls: Any) -> bool:
    """Whether ``torch.load`` with a dict of devices leaves a weight of the class ``cls`` on two devices; for probes.

    torch looks the memory's device up by text, and that of a wrapper by ``torch.device``: in vain.
    """
    if written_in(cls.__setstate__, __name__):
        return False
    torch = sys.modules["torch"]
    look_up, loading = torch._utils._get_restore_location, torch.serialization._serialization_tls
    before, loading.map_location = loading.map_location, {"cpu": "meta"}
    try:
        return bool(look_up(torch.device("cpu")) == torch.device("cpu"))
    finally:
        loading.map_location = before


def _inner_tensors(wrapper: Any) -> list[tuple[str, Any]]:
    held = vars(wrapper)
    key = (type(wrapper), *held, *map(type, held.values()))
    names = _inner_names.get(key)
    if names is None:
        if len(_inner_names) >= _MOST_LAYOUTS:
            _inner_names.clear()
        names = _inner_names[key] = tuple(wrapper.__tensor_flatten__()[0])
    found = [(name, getattr(wrapper, name)) for name in names]
    return [(name, inner) for name, inner in found if inner is not None]
