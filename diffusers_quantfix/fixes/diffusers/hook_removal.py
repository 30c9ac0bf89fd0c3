"""A cache has no effect any more once group offloading has removed a hook below its own.

Symptom: with ``enable_group_offload(use_stream=True)`` at block level and then ``enable_cache(...)``, FirstBlockCache
    and MagCache skip nothing: passes take as long as without a cache. The same happens without a stream once a LoRA was
    loaded or unloaded. With a stream at any level SeaCache skips nothing either, and at leaf level TextKVCache gives
    the negative prompt the text of the positive one: a different image, without an error.
Cause: a hook with a ``new_forward`` keeps the function it calls in ``original_forward``. ``HookRegistry.remove_hook``
    overwrites the ``forward`` of the hook above the removed one, which was its ``new_forward``, and leaves
    ``original_forward`` as it was. Group offloading removes hooks after the first pass with a stream, and with each
    LoRA.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/hooks.py; not reported.
Patch: such a hook keeps its ``new_forward``, and calls what the removed hook called.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-hook-removal",
    module="diffusers.hooks.hooks",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="wrong result",
    frames=("group_offload", "enable_cache|first.?block.?cache|mag.?cache|sea.?cache|text.?kv.?cache"),
)


def broken(hooks: ModuleType) -> bool:
    """Remove a hook below one that answers instead of the module; does it still answer?"""
    import torch

    base = resolve(hooks, "ModelHook")
    registry = resolve(hooks, "HookRegistry")
    resolve(registry, "remove_hook")
    answering = type("Answering", (base,), {"new_forward": lambda self, module, value: "answered"})
    module = torch.nn.Identity()
    registry = registry(module)
    module._diffusers_hook = registry
    registry.register_hook(base(), "below")
    registry.register_hook(answering(), "above")
    registry.remove_hook("below")
    return bool(module("passed") != "answered")


def patch(hooks: ModuleType, draft: Draft) -> None:
    registry = resolve(hooks, "HookRegistry")

    def make(original):
        def remove_hook(self, name, *args, **kwargs):
            above = _answering_above(self, name)
            if above is None:
                return original(self, name, *args, **kwargs)
            answer = above.forward
            try:
                return original(self, name, *args, **kwargs)
            finally:
                if above.forward is not answer:
                    above.original_forward, above.forward = above.forward, answer

        return remove_hook

    draft.wrap_plain(registry, "remove_hook", make)


def _answering_above(registry: Any, name: str) -> Any:
    """The functions of the hook above ``name``, if it has a ``new_forward``; else None."""
    order = registry._hook_order
    if name not in order:
        return None
    above = registry._fn_refs[order.index(name) + 1 :][:1]
    return above[0] if above and above[0].original_forward is not None else None
