"""``torch.distributed.checkpoint`` keeps every model that it has saved.

Symptom: a model's memory is not freed after ``del`` and a garbage collection, once ``get_model_state_dict`` or another
    function of ``torch.distributed.checkpoint.state_dict`` has seen it, as in ``Accelerator.save_state`` with FSDP.
Cause: ``_get_fqns`` takes the model as its first argument, and has an unlimited cache. (2.4.1: the oldest examined.)
Upstream: https://github.com/pytorch/pytorch/pull/149354; https://github.com/pytorch/pytorch/issues/149100, fixed in
    2.8.0, which removed the cache.
Patch: the function without its cache.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="torch-checkpoint-names-cache",
    module="torch.distributed.checkpoint.state_dict",
    # Torch alone does not activate the package.
    claims={"torch": ">=2.4.1,<2.8.0", "bitsandbytes": ""},
    patterns=(r"not freed .{0,60}(get_\w*state_dict|torch\.distributed\.checkpoint)",),
    harm="memory or time",
    fixed_in="torch 2.8.0",
    since="0.1.0",
)

_NAMES = "_get_fqns"


def broken(state_dict: ModuleType) -> bool:
    """Does it have a cache?"""
    return hasattr(resolve(state_dict, _NAMES), "cache_clear")


def patch(state_dict: ModuleType, draft: Draft) -> None:
    cached = resolve(state_dict, _NAMES)
    # The ledger keeps the function, and with it the models in its cache.
    cached.cache_clear()
    draft.replace(state_dict, _NAMES, cached.__wrapped__)
