"""``fully_shard`` destroys an 8-bit model.

Symptom: AttributeError "'Parameter' object has no attribute 'CB'" in the first run after ``fully_shard``; up to torch
    2.9 RuntimeError "only Tensors of floating point dtype can require gradients" from ``fully_shard`` itself, midway.
Cause: FSDP replaces each parameter with one of its own class. The scales of an 8-bit weight are attributes of the old
    one and are lost with it.
Upstream: not reported; for ``FullyShardedDataParallel``, which refuses such a model,
    https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1709. Before torch 2.6 the function is in
    ``torch.distributed._composable.fsdp``, which later re-exports that of ``torch.distributed.fsdp``.
Patch: a clear error before anything is changed, unless the weights are named in ``ignored_params``. To shard the scales
    with the weights, FSDP would need to know how they belong together.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import home_of, resolve, written_in
from ...weights import int8_params

FIX = Fix(
    __doc__,
    id="torch-shard-8bit",
    targets=(
        Target(
            "torch-composable-fully-shard-8bit",
            "torch.distributed._composable.fsdp.fully_shard",
            {"torch": ">=2.4.1,<2.6.0", "bitsandbytes": ""},
            fixed_in="torch 2.6.0",  # where the other function replaces it
        ),
        Target(
            "torch-fully-shard-8bit",
            "torch.distributed.fsdp",
            {"torch": ">=2.6.0,<=2.15.0", "bitsandbytes": ">=0.43.0,<=0.50.2"},
        ),
    ),
    patterns=(
        "'Parameter' object has no attribute 'CB'",
        r"fsdp/.{0,2000}only Tensors of floating point dtype can require gradients",
        r"only Tensors of floating point dtype can require gradients, from fully_shard",
    ),
    frames=("fully_shard|fsdp", r"_composable[./]fsdp"),
)


def broken(fsdp: ModuleType) -> bool:
    """Is the function defined in this module or below it, and not yet patched?"""
    function = resolve(fsdp, "fully_shard")
    while hasattr(function, "__wrapped__"):
        if written_in(function, int8_params.__name__):
            return False
        function = function.__wrapped__
    return bool(home_of(function).startswith(fsdp.__name__))


def patch(fsdp: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(fsdp, "fully_shard", int8_params.refuses_to_shard)
