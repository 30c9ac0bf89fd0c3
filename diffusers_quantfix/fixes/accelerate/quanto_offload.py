"""Models with quanto weights cannot be offloaded sequentially.

Symptom: ``enable_sequential_cpu_offload``, ``cpu_offload`` and ``disk_offload`` raise TypeError
    "WeightQBytesTensor.__new__() missing 6 required positional arguments: 'axis', 'size', ...".
Cause: accelerate creates a new parameter with ``type(parameter)(tensor, requires_grad=...)``. It has an exception for
    quanto's classes, but only under their names before quanto 0.2.5 (QBitsTensor). Also, a hook's weights map is a
    state dict, in which quanto has flattened the weight ``weight`` into its parts ``weight._data``, ``weight._scale``,
    ..., while the hook asks for ``weight``.
Upstream: https://github.com/huggingface/diffusers/issues/10526.
Patch: ``set_module_tensor_to_device`` creates the parameter from the moved tensor itself, as it does for the old names.
    ``AlignDevicesHook`` gets a weights map that assembles the parts; the parts stay where they are, on disk too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from ...engine.classes import lasts
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import quanto_on_meta as in_use  # noqa: F401
from ...weights.places import parameters_at

FIX = Fix(
    __doc__,
    id="accelerate-quanto-offload",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        r"WeightQ\w+Tensor\.__new__\(\) missing \d required positional arguments",
        r"__new__\(\) missing \d required positional arguments: 'axis'",
    ),
    frames=("accelerate/utils/modeling.py:set_module_tensor_to_device", "quanto"),
    hot=True,
)

_PLAIN_CLASSES = ("WeightQBytesTensor", "WeightQBitsTensor")
_answers: dict[type, bool] = {}


def broken(hooks: ModuleType) -> bool:
    """Move a parameter of a class that is built like quanto's to ``meta``; quanto itself need not be loaded."""
    import torch
    from accelerate.utils import modeling

    class QTensor(torch.Tensor):
        @staticmethod
        def __new__(cls, data, scale, requires_grad=False):
            return torch.Tensor._make_subclass(cls, data)

    class WeightQBytesTensor(QTensor):
        pass

    layer = torch.nn.Module()
    layer._parameters["weight"] = WeightQBytesTensor(torch.zeros(1), 1.0)
    try:
        resolve(modeling, "set_module_tensor_to_device")(layer, "weight", "meta")
    except TypeError:
        return True
    return False


def patch(hooks: ModuleType, draft: Draft) -> None:
    import torch
    from accelerate.utils import modeling

    def make_set(original):
        def set_module_tensor_to_device(module, tensor_name, device, value=None, dtype=None, *args, **kwargs):
            if value is not None and not is_quantized(value):  # nearly every tensor of every load
                return original(module, tensor_name, device, value, dtype, *args, **kwargs)
            parameters, name = parameters_at(module, tensor_name)
            held: Any = parameters.get(name)
            if not is_quantized(held):
                return original(module, tensor_name, device, value, dtype, *args, **kwargs)
            source = held if value is None else value
            if dtype not in (None, source.dtype) or (source.is_meta and torch.device(device).type != "meta"):
                return original(module, tensor_name, device, value, dtype, *args, **kwargs)
            moved = source.to(device, non_blocking=kwargs.get("non_blocking", False))
            if moved is not held:
                parameter = torch.nn.Parameter(moved, requires_grad=held.requires_grad)
                if "_is_hf_initialized" in vars(held):
                    parameter._is_hf_initialized = held._is_hf_initialized
                parameters[name] = parameter
            return None

        return set_module_tensor_to_device

    def make_init(original):
        def init_hook(self, module):
            if self.offload and self.weights_map is not None:
                recipes = {
                    name: recipe(plain(parameter))
                    for name, parameter in module.named_parameters(recurse=self.place_submodules)
                    if is_quantized(parameter)
                }
                if recipes:
                    self.weights_map = AssembledWeights(self.weights_map, recipes)
            return original(self, module)

        return init_hook

    resolve(modeling, "set_module_tensor_to_device")
    draft.wrap_plain(modeling, "set_module_tensor_to_device", make_set)
    draft.wrap_plain(resolve(hooks, "AlignDevicesHook"), "init_hook", make_init)


class AssembledWeights(Mapping[str, object]):
    """A weights map that also has the quanto weights, of which ``weights_map`` has only the parts.

    Args:
        weights_map: the map of a hook: a state dict, or a ``PrefixedDataset`` over one in memory or on disk.
        recipes: the name of each weight -> how to assemble it from its parts.
    """

    def __init__(self, weights_map: Any, recipes: dict[str, Any]) -> None:
        # The attribute names of PrefixedDataset, by which other code finds the underlying maps.
        self.dataset = getattr(weights_map, "dataset", weights_map)
        self.prefix = getattr(weights_map, "prefix", "")
        self.recipes = recipes

    def __getitem__(self, key: str) -> Any:
        try:
            return self.dataset[self.prefix + key]
        except KeyError:
            if key not in self.recipes:
                raise
        return self.assembled(self.recipes[key], self.prefix + key)

    def assembled(self, recipe: Any, name: str) -> Any:
        cls, meta, parts = recipe
        tensors = {
            part: self.dataset[f"{name}.{part}"]
            if deeper is None
            else self.assembled(deeper, f"{name}.{part}")
            for part, deeper in parts.items()
        }
        return cls.__tensor_unflatten__(tensors, meta, None, None)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self.dataset if name.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


def recipe(tensor: Any) -> tuple[Any, ...]:
    """How to assemble ``tensor`` from its parts: (class, meta data, part -> None for a tensor, or its own recipe)."""
    import torch

    names, meta = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return (
        type(tensor),
        meta,
        {name: None if type(part) is torch.Tensor else recipe(part) for name, part in parts.items()},
    )


def plain(weight: Any) -> Any:
    """The weight packed as in a state dict, not for a kernel."""
    if type(weight).__name__ in _PLAIN_CLASSES:
        return weight
    is_8bit = any(cls.__name__ == _PLAIN_CLASSES[0] for cls in type(weight).__mro__)
    return weight.weight_qbytes_tensor() if is_8bit else weight.weight_qbits_tensor()


def is_quantized(tensor: Any) -> bool:
    """Whether ``tensor`` is a quanto weight."""
    kind = type(tensor)
    known = _answers.get(kind)
    if known is None:
        known = any(cls.__name__ == "QTensor" for cls in kind.__mro__)
        if lasts(kind):
            _answers[kind] = known
    return known
