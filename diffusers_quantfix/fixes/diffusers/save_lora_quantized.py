"""The LoRA of a quantized model cannot be saved with ``save_lora_adapter``.

Symptom: ValueError "Casting a quantized model to a new `dtype` is unsupported" from ``model.save_lora_adapter(...)``;
    before 0.37 "`.to` is not supported for `8-bit` bitsandbytes models" in 8-bit.
Cause: ``save_lora_adapter`` calls ``self.to(dtype=None)``, or ``self.to(dtype=torch.float32)`` with
    ``upcast_before_saving=True``; ``ModelMixin.to`` of a quantized model refuses any dtype, even None.
Upstream: not reported.
Patch: ``save_lora_adapter`` of a quantized model gets a view of the model whose ``to`` casts nothing. With
    ``upcast_before_saving=True`` the LoRA is written in float32; the model keeps its dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...models.casting import is_quantized

FIX = Fix(
    __doc__,
    id="diffusers-save-lora-quantized",
    module="diffusers.loaders.peft",
    claims={"diffusers": ">=0.32.0,<=0.42.1"},
    patterns=(
        "Casting a quantized model to a new dtype is unsupported",
        r"\.to is not supported for (4-bit or )?8-bit",
    ),
    frames=("loaders/peft.py:save_lora_adapter", r"save_lora_adapter\("),
    asked_once=True,
)


def broken(peft: ModuleType) -> bool:
    """Does it pass only a dtype to the model's ``.to``?"""
    method = resolve(peft, "PeftAdapterMixin.save_lora_adapter")
    code = function_of(method).__code__
    return "to" in code.co_names and ("dtype",) in code.co_consts


def patch(peft: ModuleType, draft: Draft) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_lora_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(_Uncast(self) if is_quantized(self) else self, *args, **kwargs)

        return save_lora_adapter

    draft.wrap_plain(resolve(peft, "PeftAdapterMixin"), "save_lora_adapter", make)


class _Uncast:
    """A view of a quantized model: ``to(dtype=...)`` changes only the adapter's dtype in its state dict."""

    def __init__(self, model: Any, dtype: Any = None) -> None:
        self._model = model
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def to(self, dtype: Any) -> _Uncast:
        return _Uncast(self._model, dtype)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All tensors of the model, name -> tensor; those of adapters in the requested dtype."""
        tensors = self._model.state_dict(*args, **kwargs)
        if self._dtype is None:
            return dict(tensors)
        return {
            name: tensor.to(self._dtype) if _is_of_an_adapter(name) and tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }


def _is_of_an_adapter(name: str) -> bool:
    """Whether peft saves the tensor of that name with a LoRA: a factor, a layer saved along with it, or a bias."""
    return "lora_" in name or ".modules_to_save." in name or name.endswith("bias")
