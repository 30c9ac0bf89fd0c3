"""The ``fully_shard`` of torch before 2.6 destroys an 8-bit model.

Symptom: RuntimeError "only Tensors of floating point dtype can require gradients" from
    ``torch.distributed._composable.fsdp.fully_shard``, midway.
Cause: FSDP exchanges each parameter for one of its own class. The scales of an 8-bit weight are attributes of the old
    one and are lost with it.
Upstream: not reported; for ``FullyShardedDataParallel``, which refuses such a model, bitsandbytes issue 1709.
Patch: a clear error, before anything is changed. From torch 2.6 on the module passes on the function of
    ``torch.distributed.fsdp``, for which ``torch-fully-shard-8bit`` does it.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import home_of, resolve, written_in
from ...weights import int8_params

FIX = Fix(
    id="torch-composable-fully-shard-8bit",
    title="the fully_shard of torch before 2.6 destroys an 8-bit model",
    module="torch.distributed._composable.fsdp.fully_shard",
    claims={"torch": ">=2.4.1,<2.6.0", "bitsandbytes": ""},
    upstream=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1709",),
    symptom="RuntimeError: only Tensors of floating point dtype can require gradients, from "
    "torch.distributed._composable.fsdp.fully_shard",
    patterns=(r"fsdp/.{0,2000}only Tensors of floating point dtype can require gradients",),
    frames=("_composable/fsdp", "_composable.fsdp", "fully_shard"),
    fixed_in="torch 2.6.0",  # in so far as it is the function there that torch-fully-shard-8bit patches
    since="0.1.0",
)


def broken(fsdp: ModuleType) -> bool:
    """Is the function written here, and nothing of ours around it?"""
    function = resolve(fsdp, "fully_shard")
    while hasattr(function, "__wrapped__"):
        if written_in(function, int8_params.__name__):
            return False
        function = function.__wrapped__
    return bool(home_of(function).startswith(fsdp.__name__))


def patch(fsdp: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(fsdp, "fully_shard", int8_params.refuses_to_shard)
