"""The LoRAs of a compiled model are neither fused nor scaled nor removed.

Symptom: no error, but a LoRA of a compiled transformer, ``torch.compile(pipe.transformer)``, cannot be fused, switched
    off or unloaded by the pipeline. ValueError "Adapter name(s) {'one'} not in the list of present adapters: set()"
    from ``set_adapters``.
Cause: they ask whether ``model.__class__`` is a ``ModelMixin``, and a compiled model's is torch's ``OptimizedModule``.
Upstream: https://github.com/huggingface/diffusers/issues/11408,
    https://github.com/huggingface/diffusers/issues/11766 (both closed without a change).
Patch: they see the model that was compiled in its place. torch compiles it again where the LoRA's state has changed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.compiled import is_compiled, uncompiled

FIX = Fix(
    __doc__,
    id="diffusers-lora-compiled",
    module="diffusers.loaders.lora_base",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "peft": ""},
    harm="wrong result",
    patterns=(
        r"\A(?=.*torch\.compile).*Adapter name\(s\) .{0,200} not in the list of present adapters: set\(\)",
    ),
    frames=("set_adapters|fuse_lora|disable_lora|unload_lora_weights", r"torch\.compile|OptimizedModule"),
    since="0.1.0",
)

_MIXIN = "LoraBaseMixin"
_METHODS = (
    "unload_lora_weights",
    "fuse_lora",
    "unfuse_lora",
    "set_adapters",
    "disable_lora",
    "enable_lora",
    "delete_adapters",
    "get_active_adapters",
    "get_list_adapters",
    "set_lora_device",
)


def broken(lora_base: ModuleType) -> bool:
    """Is the LoRA of a compiled model left on?"""
    asked = []

    class Model(resolve(lora_base, "ModelMixin")):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def modules(self) -> Any:
            return iter(())

        def disable_lora(self) -> None:
            asked.append(self)

    class OptimizedModule:
        """As torch's, which would bring the compiler."""

        _orig_mod = Model()

    pipeline = type("Pipeline", (resolve(lora_base, _MIXIN),), {"_lora_loadable_modules": ["model"]})()
    pipeline.model = OptimizedModule()
    pipeline.disable_lora()
    return not asked


def patch(lora_base: ModuleType, draft: Draft) -> None:
    mixin = resolve(lora_base, _MIXIN)

    def make(upstream: Any) -> Any:
        def method(self, *args, **kwargs):
            return upstream(_uncompiled(self), *args, **kwargs)

        return method

    for name in _METHODS:
        if name in vars(mixin):
            draft.wrap_plain(mixin, name, make)


class _Uncompiled:
    """A pipeline with models in the place of those compiled from them; what is set is set on the pipeline."""

    def __init__(self, pipeline: Any, models: dict[str, Any]) -> None:
        vars(self).update(_pipeline=pipeline, **models)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pipeline, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # in sentences, and for isinstance
        return type(self._pipeline)


def _uncompiled(pipeline: Any) -> Any:
    """The pipeline, or what stands for it where a model of it is compiled."""
    models = {name: uncompiled(value) for name, value in vars(pipeline).items() if is_compiled(value)}
    return _Uncompiled(pipeline, models) if models else pipeline
