"""Remove accelerate's hooks from a model temporarily, and put the same hook objects back.

Under sequential offload the weights are on ``meta`` between two uses. Code that changes a model (loads or merges an
adapter, replaces a layer) must remove the hooks first. diffusers does so, and then offloads the whole pipeline in one
of two ways, although single components may have been offloaded differently or not at all. The fixes that change
offloaded models share this module, which keeps every hook and gives it back to its module.

- An offloading hook keeps its execution device and all its options. Its weights map is rebuilt from the module's
  present weights, without copying those that stayed on the CPU; a map that reads from disk is kept while it is valid.
- A module that was added meanwhile is hooked like its neighbours.
- A hook that does not offload (``CpuOffload``, or one that only aligns inputs) stays active. `hidden_hooks` hides it
  from code that draws wrong conclusions from it.

Neither torch nor accelerate is imported here: without ``accelerate.hooks`` in the process no hook can exist.

Upstream: accelerate/hooks.py (``AlignDevicesHook``, ``SequentialHook``, ``add_hook_to_module``).
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial

from ..finishing import finished
from .containers import hook_containers, hook_passed_layers
from .hooks import align_hooks, is_sequentially_offloaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

__all__ = ["hidden_hooks", "hooks_aside"]

_HOOK = "_hf_hook"
_ATTRIBUTES = (_HOOK, "forward", "_old_forward")
# State dict entries of an 8-bit layer, besides its parameters, that accelerate needs to restore the weight.
_OF_8BIT = ("SCB", "weight_format")


@contextlib.contextmanager
def hooks_aside(*models: Any, device: Any = "cpu") -> Iterator[None]:
    """In the block, ``models`` have their weights and no offloading hooks.

    The hooks are put back at the end, also after an error, and if that is interrupted.

    Args:
        models: modules; other objects are skipped.
        device: where the offloaded weights are in the block. Other weights are not moved.
    """
    offloaded = [model for model in models if is_sequentially_offloaded(model)]
    taken = [_Taken(model) for model in offloaded]
    with finished(lambda: (step for model in taken for step in model.put_back())):
        for model in taken:
            for one in model.hooked:
                _take_off(one, device)
        yield


@contextlib.contextmanager
def hidden_hooks(models: Iterable[Any]) -> Iterator[None]:
    """In the block, the modules in ``models`` have no ``_hf_hook``; what the hook patched stays patched.

    Other objects are skipped. This is for code that searches for hooks to remove them. The models cannot be run in the
    block.
    """
    found: list[tuple[Any, Any]] = []
    with finished(lambda: [partial(vars(model).setdefault, _HOOK, hook) for model, hook in found]):
        for model in models:
            if _is_module(model) and _HOOK in vars(model):
                found.append((model, vars(model)[_HOOK]))
                del vars(model)[_HOOK]
        yield


class _Hooked:
    """A module with its offloading hooks and the attributes that accelerate has set on it."""

    __slots__ = ("attributes", "hooks", "maps", "module", "name", "original_devices")

    def __init__(self, name: str, module: Any, hooks: list[Any]) -> None:
        self.name = name
        self.module = module
        self.hooks = hooks
        self.attributes = {key: vars(module)[key] for key in _ATTRIBUTES if key in vars(module)}
        self.original_devices = [hook.original_devices for hook in hooks]
        self.maps: list[Any] = []  # the hooks' new weights maps


class _Newcomer:
    """A new module and the hook that it gets."""

    __slots__ = ("hook", "module", "original_devices")

    def __init__(self, module: Any, hook: Any) -> None:
        self.module = module
        self.hook = hook
        hook.weights_map = _weights_of(module, hook)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        self.original_devices = {name: tensor.device for name, tensor in tensors}

    def put_on(self) -> None:
        sys.modules["accelerate.hooks"].add_hook_to_module(self.module, self.hook)
        # What the hook saw, if this was interrupted: the weights were on meta already.
        self.hook.original_devices = {**self.hook.original_devices, **self.original_devices}


class _Taken:
    """A model whose offloading hooks are taken off."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooked = _hooked_in(model)
        self._known = list(model.modules())
        self._newcomers: dict[int, _Newcomer] = {}  # by the id of the module

    def put_back(self) -> Iterator[Callable[[], None]]:
        """The steps that give every module that is still in the model its own hooks back, and hook new modules like
        their neighbours."""
        present = {id(module) for module in self.model.modules()}
        for one in self.hooked:
            # The hook is there if it was not taken off, or another was put on meanwhile.
            if id(one.module) in present and _HOOK not in vars(one.module):
                yield partial(_hook_again, one)
        yield self._find_newcomers
        for newcomer in list(self._newcomers.values()):
            yield newcomer.put_on
        yield self._hook_readers

    def _find_newcomers(self) -> None:
        """Those modules of the model that are new and own tensors, with a hook each: their neighbour's."""
        known = {id(module) for module in self._known}
        patterns = {id(one.module): one.hooks[-1] for one in self.hooked}
        by_name = {one.name: one.hooks[-1] for one in self.hooked}
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            if id(module) in known or id(module) in self._newcomers or _HOOK in vars(module):
                continue
            own = [*module._parameters.values(), *module._buffers.values()]
            tensors = [tensor for tensor in own if tensor is not None]
            # On meta it is if its loading was interrupted; it cannot be run, hooked or not.
            if not tensors or any(tensor.is_meta for tensor in tensors):
                continue
            # Like the offloaded module of the same name (a replaced layer), or else like the nearest one.
            like = by_name.get(name) or _nearest(name, modules, patterns, known)
            if like is None:
                continue
            hook = sys.modules["accelerate.hooks"].AlignDevicesHook(
                execution_device=like.execution_device,
                offload=True,
                offload_buffers=like.offload_buffers,
                skip_keys=like.skip_keys,
            )
            self._newcomers[id(module)] = _Newcomer(module, hook)

    def _hook_readers(self) -> None:
        for module in self.model.modules():
            hook_containers(module)
            hook_passed_layers(module)


def _hooked_in(model: Any) -> list[_Hooked]:
    """The modules of ``model`` with offloading hooks."""
    hooked = []
    for name, module in model.named_modules():
        # Its own only: a module wrapped by torch.compile shows the hook of the inner module, which is visited too.
        hooks = [hook for hook in align_hooks(module) if hook.offload] if _HOOK in vars(module) else []
        if hooks:
            hooked.append(_Hooked(name, module, hooks))
    return hooked


def _take_off(one: _Hooked, device: Any) -> None:
    """Remove the offloading hooks of a module, with its weights on ``device``."""
    for hook in one.hooks:
        # Not the original device: that may be meta, if the model was loaded offloaded, or a device without room for
        # the whole model.
        hook.original_devices = dict.fromkeys(hook.original_devices, _place(one.module, device))
        hook.detach_hook(one.module)
        _give_scales(one.module, hook)
    for key in one.attributes:  # the hook first: without it, the module has its weights
        del vars(one.module)[key]
    old_forward = one.attributes.get("_old_forward")
    if getattr(old_forward, "__func__", None) is not type(one.module).forward:
        one.module.forward = old_forward


def _place(module: Any, device: Any) -> Any:
    """``device`` in the form to pass to accelerate for the weights of ``module``.

    After a move to anything but the string "cpu", accelerate empties the caches of all devices, once per weight. But
    given that string, it moves 8-bit weights to a GPU and back.
    """
    place = sys.modules["torch"].device(device)
    if place.type != "cpu" or any(type(weight).__name__ == "Int8Params" for weight in module.parameters()):
        return place
    return "cpu"


def _give_scales(module: Any, hook: Any) -> None:
    """Restore the scales of 8-bit weights, which older releases of accelerate lose when they detach a hook."""
    deep = hook.place_submodules
    for name, layer in module.named_modules() if deep else [("", module)]:
        if type(layer).__name__ != "Linear8bitLt" or layer.weight.is_meta:
            continue
        if getattr(layer.weight, "SCB", None) is None and layer.state.SCB is None:
            scales = (hook.weights_map or {}).get(f"{name}.SCB" if name else "SCB")
            if scales is not None:
                layer.weight.SCB = scales.to(layer.weight.device)


def _hook_again(one: _Hooked) -> None:
    """Give a module its hooks back, with its present weights: never with those from before."""
    one.maps = one.maps or [_weights_of(one.module, hook) for hook in one.hooks]
    for hook, weights in zip(one.hooks, one.maps, strict=True):
        hook.weights_map = weights
    vars(one.module).update(one.attributes)
    for hook, original_devices in zip(one.hooks, one.original_devices, strict=True):
        hook.init_hook(one.module)
        hook.original_devices = {**hook.original_devices, **original_devices}


def _weights_of(module: Any, hook: Any) -> Mapping[str, Any]:
    """The weights map of ``hook`` for the present weights of ``module``.

    A map that reads from disk is kept while its values are those of the module; otherwise they stay in memory.
    """
    known: Mapping[str, Any] | None = hook.weights_map
    deep = hook.place_submodules
    names = {
        name for name, _ in [*module.named_parameters(recurse=deep), *module.named_buffers(recurse=deep)]
    }
    state = module.state_dict()
    # A wrapper (quanto) has several entries in the state dict.
    parts = tuple(f"{name}." for name in names if name not in state)
    tensors = {
        name: tensor
        for name, tensor in state.items()
        if name in names or name.startswith(parts) or (name.endswith(_OF_8BIT) and (deep or "." not in name))
    }
    if known is not None and _reads_from_disk(known) and _says(known, tensors):
        return known
    return {name: tensor.to("cpu") for name, tensor in tensors.items()}


def _reads_from_disk(weights: Any) -> bool:
    while hasattr(weights, "dataset"):  # PrefixedDataset
        weights = weights.dataset
    # A loader of weights that are all in memory has an index too, an empty one.
    return bool(getattr(weights, "index", None)) or getattr(weights, "save_folder", None) is not None


def _says(weights: Any, tensors: Mapping[str, Any]) -> bool:
    equal = sys.modules["torch"].equal
    for name, tensor in tensors.items():
        stored = weights.get(name)
        if stored is None or stored.dtype != tensor.dtype:
            return False
        try:
            if not equal(stored.to("cpu"), tensor.to("cpu")):
                return False
        except NotImplementedError:  # torchao's weights cannot be compared
            return False
    return True


def _nearest(name: str, modules: Mapping[str, Any], patterns: Mapping[int, Any], known: set[int]) -> Any:
    """The hook of the first older module in the smallest part of the model around ``name``.

    None if that module is not offloaded: a model may be spread over a device, the CPU and the disk.
    """
    while name:
        name = name.rpartition(".")[0]
        for module in modules[name].modules():
            if id(module) in patterns:
                return patterns[id(module)]
            if id(module) in known and next(module.parameters(recurse=False), None) is not None:
                return None
    return None


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
