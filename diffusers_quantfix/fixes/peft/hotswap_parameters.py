"""Hotswapping a LoRA leaves plain tensors in place of parameters.

Symptom: TypeError "new() received an invalid combination of arguments" from ``load_lora_weights(..., hotswap=True)``
    under ``enable_sequential_cpu_offload()``. Without offloading there is no error, but ``model.parameters()`` has
    tensors that cannot be trained, and the state dict passed in then holds the old LoRA's weights.
Cause: ``hotswap_adapter_from_state_dict`` swaps the parameter with the state dict's tensor by
    ``torch.utils.swap_tensors``, which also swaps their classes: always before peft 0.20, since then only if the new
    rank is larger. accelerate creates its meta tensors with the class of the parameter.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/hotswap.py; not reported.
Patch: the function gets parameters: copies of the tensors, on the device of those they replace.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="peft-hotswap-parameters",
    module="peft.utils.hotswap",
    claims={"peft": ">=0.14.0,<=0.21.2"},
    patterns=(r"new\(\) received an invalid combination of arguments - got \(Tensor, requires_grad=bool\)",),
    frames=("load_lora_weights|hotswap", "diffusers/loaders/peft.py:load_lora_adapter"),
)
_NAME = "hotswap_adapter_from_state_dict"


def broken(hotswap: ModuleType) -> bool:
    """Swap a LoRA of rank 2 into one of rank 1; is its weight still a parameter?"""
    from inspect import signature

    import torch

    swap = resolve(hotswap, _NAME)
    model, layer, factor, adapter = (torch.nn.Module() for _ in range(4))
    model.layer, layer.lora_A, factor.default = layer, factor, adapter
    layer.scaling = {"default": 1.0}
    adapter.weight = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
    config = SimpleNamespace(rank_pattern={}, alpha_pattern={}, r=2, lora_alpha=2, use_rslora=False)
    new = {"layer.lora_A.default.weight": torch.zeros(2, 1, device="cpu")}
    # peft 0.14 has no config here: it changes neither the rank nor the scaling.
    swap(model, new, "default", **({"config": config} if "config" in signature(swap).parameters else {}))
    return not isinstance(adapter.weight, torch.nn.Parameter)


def patch(hotswap: ModuleType, draft: Draft) -> None:
    def wrapper(original, instance, args, kwargs):
        names = ("model", "state_dict")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(names) <= set(given):
            swapped = _parameters(given["model"], given["state_dict"])
            if len(args) > 1:
                args = (args[0], swapped, *args[2:])
            else:
                kwargs = {**kwargs, "state_dict": swapped}
        return original(*args, **kwargs)

    draft.wrap_wrapt(hotswap, _NAME, wrapper)


def _parameters(model: object, state_dict: dict[str, object]) -> dict[str, object]:
    """The tensors as parameters like those of ``model`` that they replace; a tensor that replaces none stays, for
    upstream's own error."""
    from operator import attrgetter

    import torch

    found: dict[str, object] = {}
    for name, new in state_dict.items():
        try:
            old = attrgetter(name)(model)
        except AttributeError:
            old = None
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            new = torch.nn.Parameter(new.detach().to(old.device, copy=True), requires_grad=old.requires_grad)
        found[name] = new
    return found
