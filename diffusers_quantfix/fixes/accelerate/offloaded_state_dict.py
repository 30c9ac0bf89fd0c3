"""The state dict of a sequentially offloaded model has no data, so it cannot be saved.

Symptom: ``save_pretrained`` of a model or a pipeline after ``enable_sequential_cpu_offload`` or
    ``accelerate.cpu_offload``: NotImplementedError "Cannot copy out of meta tensor; no data!", or RuntimeError "The
    weights trying to be saved contained shared tensors" from transformers 4. ``save_lora_weights`` is affected too.
Cause: between uses the parameters are on ``meta``; the weights are in the ``weights_map`` of the hooks, where
    ``state_dict()`` does not look.
Upstream: https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py; accelerate has
    ``get_state_dict_offloaded_model`` for this, but diffusers never calls it, and transformers calls it only for models
    with a ``hf_device_map`` that names the CPU or the disk.
Patch: a module that gets an offloading hook also gets a state-dict hook, which fills in the tensors on ``meta`` from
    the weights map, without a copy. It is removed together with the offloading hook. Weights on disk stay on ``meta``:
    reading all of them at once would defeat the purpose of disk offload, and transformers has its own way to save
    those.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.hooks import accelerate_hooks

FIX = Fix(
    __doc__,
    id="accelerate-offloaded-state-dict",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0"},
    patterns=(
        "Cannot copy out of meta tensor; no data",
        "The weights trying to be saved contained shared tensors",
    ),
    frames=("save_pretrained", "safetensors/torch.py", "state_dict"),
)

# Entries of an 8-bit layer's state dict besides its tensors; they are not written without scales on the layer.
_OF_8BIT = ("SCB", "weight_format")


def broken(hooks: ModuleType) -> bool:
    """Offload a one-weight layer; is the weight in its state dict?"""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False)
    hook = resolve(hooks, "AlignDevicesHook")(execution_device="cpu", offload=True)
    resolve(hooks, "add_hook_to_module")(layer, hook)
    return bool(layer.state_dict()["weight"].is_meta)


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make_add(original):
        def add_hook_to_module(module, hook, append=False):
            module = original(module, hook, append)
            registered = module._state_dict_hooks.values()
            if fill_from_weights_map not in registered and any(_offloading(module)):
                module._register_state_dict_hook(fill_from_weights_map)
            return module

        return add_hook_to_module

    def make_remove(original):
        def remove_hook_from_module(module, recurse=False):
            for key, hook in list(module._state_dict_hooks.items()):
                if hook is fill_from_weights_map:
                    del module._state_dict_hooks[key]
            return original(module, recurse)

        return remove_hook_from_module

    resolve(hooks, "AlignDevicesHook")
    draft.wrap_plain(hooks, "add_hook_to_module", make_add)
    draft.wrap_plain(hooks, "remove_hook_from_module", make_remove)


def fill_from_weights_map(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace the meta tensors of ``module`` in ``state_dict`` with the tensors that its offloading hooks hold in
    memory.

    If it stays on a module (because the caller uses upstream's ``remove_hook_from_module``), it does nothing.
    """
    for hook in _offloading(module):
        layers = module.named_modules() if hook.place_submodules else [("", module)]
        for path, layer in layers:
            names = [part for name, held in layer._parameters.items() for part in _entries(name, held)]
            names += layer._buffers
            if type(layer).__name__ == "Linear8bitLt":
                names += _OF_8BIT
            for name in names:
                full_name = f"{path}.{name}" if path else name
                present = state_dict.get(prefix + full_name)
                if present is None and name not in _OF_8BIT:
                    continue  # no bias, or a buffer that is not saved
                if present is None or present.is_meta:
                    stored = _in_memory(hook.weights_map, full_name)
                    if stored is not None:
                        state_dict[prefix + full_name] = stored.detach()


def _entries(name: str, parameter: Any) -> Iterator[str]:
    """The entries of a state dict for one parameter: quanto flattens its weights into their parts."""
    if any(cls.__name__ == "QTensor" for cls in type(parameter).__mro__):
        pending = [(name, parameter)]
        while pending:
            name, tensor = pending.pop()
            if hasattr(tensor, "__tensor_flatten__"):
                pending += [
                    (f"{name}.{part}", getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0]
                ]
            else:
                yield name
    else:
        yield name


def _offloading(module: Any) -> Iterator[Any]:
    """Yield the hooks of ``module`` itself that keep weights in a weights map."""
    for hook in accelerate_hooks(module):
        if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None:
            yield hook


def _in_memory(weights: Any, name: str) -> Any:
    """The tensor ``name`` of a weights map; None when it has none, or has it on disk."""
    while not isinstance(weights, dict):
        if hasattr(weights, "dataset"):  # PrefixedDataset
            weights, name = weights.dataset, weights.prefix + name
        elif hasattr(weights, "state_dict"):  # OffloadedWeightsLoader: its state dict holds what is in memory
            weights = weights.state_dict
        else:
            return None
    return weights.get(name)
