"""Transformer2DModel cannot be loaded.

Symptom: RecursionError "maximum recursion depth exceeded" from ``from_pretrained`` or ``from_config`` of a
    ``Transformer2DModel`` that is not a DiT or a PixArt, or of a pipeline with one, such as VQ Diffusion.
Cause: ``LegacyModelMixin.from_pretrained`` finds the class that the model has today, and calls its
    ``from_pretrained``, which is itself where the class has no other; ``LegacyConfigMixin.from_config`` does the same.
Upstream: https://github.com/huggingface/diffusers/pull/11923, in 0.35.0.
Patch: the inner call of the same class is that of ``ModelMixin``, or ``ConfigMixin``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="diffusers-legacy-model",
    targets=(
        Target(
            "diffusers-legacy-model-load",
            "diffusers.models.modeling_utils",
            {"diffusers": ">=0.31.0,<0.35.0"},
            fixed_in="diffusers 0.35.0",
        ),
        Target(
            "diffusers-legacy-model-config",
            "diffusers.configuration_utils",
            {"diffusers": ">=0.31.0,<0.35.0"},
            fixed_in="diffusers 0.35.0",
        ),
    ),
    patterns=(r"(modeling|configuration)_utils\.py.{0,4000}maximum recursion depth exceeded",),
    frames=("_fetch_remapped_cls_from_config", "Transformer2DModel", "VQDiffusion", "from_pretrained"),
    asked_once=True,
    since="0.1.0",
)

# Module -> class, its method
_METHODS = {
    "modeling_utils": ("LegacyModelMixin", "from_pretrained"),
    "configuration_utils": ("LegacyConfigMixin", "from_config"),
}


def broken(module: ModuleType) -> bool:
    """Is there no call of the base class's method? Only loading a model would show it otherwise."""
    return "super" not in names_used(resolve(module, ".".join(_method(module))))


def patch(module: ModuleType, draft: Draft) -> None:
    import threading

    name, method = _method(module)
    legacy = resolve(module, name)
    outer = threading.local()  # .cls: of the call that looks for another class

    def make(original):
        def load(cls, *args, **kwargs):
            if getattr(outer, "cls", None) is cls:
                outer.cls = None
                return getattr(super(legacy, cls), method)(*args, **kwargs)
            try:
                outer.cls = cls
                return original(cls, *args, **kwargs)
            finally:
                outer.cls = None

        return load

    draft.wrap_plain(legacy, method, make)


def _method(module: ModuleType) -> tuple[str, str]:
    return _METHODS[module.__name__.rpartition(".")[2]]
