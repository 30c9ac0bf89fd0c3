"""A model with a hook of diffusers loses inputs in modular pipelines.

Symptom: a Helios modular pipeline gives another video under group offload or with a cache, without an error; one of
    Qwen-Image raises TypeError "cannot unpack non-iterable NoneType object".
Cause: modular pipelines give the denoiser what its ``forward`` names (``inspect.signature(...).parameters``).
    ``HookRegistry.register_hook`` replaces ``forward`` by a function that names ``*args, **kwargs`` only.
Upstream: https://github.com/huggingface/diffusers/pull/14285, in 0.40.0.
Patch: the function with the hook is marked as a wrapper of the model's own ``forward`` (``__wrapped__``), which
    ``inspect.signature`` follows. Upstream marks it as one of the hook below, which a removed hook would outlive.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-hook-signature",
    module="diffusers.hooks.hooks",
    claims={"diffusers": ">=0.33.0,<0.40.0"},
    fixed_in="diffusers 0.40.0",
    harm="wrong result",
    patterns=(r"modular_pipelines?.{0,4000}cannot unpack non-iterable NoneType object",),
    frames=(
        r"modular_pipelines?/",
        "group_offload|group offload|enable_cache",
        "HookRegistry",
        "inspect.signature",
    ),
    since="0.1.0",
)


def broken(hooks: ModuleType) -> bool:
    """Does the ``forward`` of a module with a hook still name what it takes?"""
    import torch

    module = torch.nn.Identity()
    registry = resolve(hooks, "HookRegistry")(module)
    registry.register_hook(resolve(hooks, "ModelHook")(), "a probe")
    return "input" not in inspect.signature(module.forward).parameters


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make(original):
        def register_hook(self, *args, **kwargs):
            before = self._module_ref.forward
            result = original(self, *args, **kwargs)
            after = self._module_ref.forward
            if after is not before and isinstance(after, functools.partial):
                own = (
                    getattr(before, "__wrapped__", before)
                    if isinstance(before, functools.partial)
                    else before
                )
                after.__wrapped__ = own  # type: ignore[attr-defined]
            return result

        return register_hook

    draft.wrap_plain(resolve(hooks, "HookRegistry"), "register_hook", make)
