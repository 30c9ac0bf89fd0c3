"""TextKVCache enabled after block-level group offload finds a block's weights on the CPU.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    from ``new_forward`` of diffusers/hooks/text_kv_cache.py, after ``enable_group_offload(offload_type="block_level")``
    and then ``enable_cache(TextKVCacheConfig())``. The other order works.
Cause: the cache's hook runs layers of the block itself, before the hook below it, which onloads them.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/text_kv_cache.py#L125; not reported.
Patch: for a prompt that the block has not seen, the hook below onloads the block first, and then again as usual; this
    happens once for each prompt of an image.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="diffusers-text-kv-cache-group-offload",
    module="diffusers.hooks.text_kv_cache",
    claims={"diffusers": ">=0.38.0,<=0.42.1"},
    patterns=(r"text_kv_cache.{0,4000}Expected all tensors to be on the same device",),
    frames=("text_kv_cache.py:new_forward", "text.?kv.?cache", "group_offload", "block_level"),
    since="0.1.0",
    hot=True,
    asked_once=True,
)


def broken(text_kv_cache: ModuleType) -> bool:
    """Does a block's hook itself run a layer of the block?  A stand-in would import a diffusers model."""
    new_forward = resolve(text_kv_cache, "TextKVCacheBlockHook.new_forward")
    return "encoder_proj" in names_used(new_forward)


def patch(text_kv_cache: ModuleType, draft: Draft) -> None:
    name = resolve(text_kv_cache, "_TEXT_KV_CACHE_BLOCK_HOOK")

    def make(original):
        def new_forward(self, module, *args, **kwargs):
            below = _group_hook_below(module, name)
            if below is not None and not _has_seen_prompt(self):
                args, kwargs = below.pre_forward(module, *args, **kwargs)
            return original(self, module, *args, **kwargs)

        return new_forward

    draft.wrap_plain(resolve(text_kv_cache, "TextKVCacheBlockHook"), "new_forward", make)


def _group_hook_below(module: Any, name: str) -> Any:
    """The hook that onloads the weights of ``module``, if it runs after the one of this name."""
    registry = module._diffusers_hook
    order = registry._hook_order
    if "group_offloading" in order[: order.index(name)]:
        return registry.get_hook("group_offloading")
    return None


def _has_seen_prompt(hook: Any) -> bool:
    try:
        prompt = hook.state_manager.get_state().key
        return prompt in hook.block_state_manager.get_state().kv_cache
    except ValueError:  # outside a ``cache_context``, before the first pass
        return False
