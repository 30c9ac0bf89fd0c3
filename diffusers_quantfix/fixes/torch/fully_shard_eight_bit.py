"""``fully_shard`` destroys an 8-bit model.

Symptom: AttributeError "'Parameter' object has no attribute 'CB'" in the first run after ``fully_shard``; up to torch
    2.9 RuntimeError "only Tensors of floating point dtype can require gradients" from ``fully_shard`` itself, midway.
Cause: FSDP exchanges each parameter for one of its own class. The scales of an 8-bit weight are attributes of the old
    one and are lost with it.
Upstream: not reported; for ``FullyShardedDataParallel``, which refuses such a model, bitsandbytes issue 1709.
Patch: a clear error, before anything is changed, unless the weights are named in ``ignored_params``. To shard the
    scales with the weights, FSDP would need to know how they belong together.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...weights import int8_params

FIX = Fix(
    id="torch-fully-shard-8bit",
    title="fully_shard destroys an 8-bit model",
    module="torch.distributed.fsdp",
    # Before, the function is in another module: torch-composable-fully-shard-8bit.
    claims={"torch": ">=2.6.0,<=2.15.0", "bitsandbytes": ">=0.43.0,<=0.50.2"},
    upstream=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1709",),
    symptom="AttributeError: 'Parameter' object has no attribute 'CB', in the first run after fully_shard",
    patterns=("'Parameter' object has no attribute 'CB'",),
    frames=("fully_shard|fsdp",),
    since="0.1.0",
)


def broken(fsdp: ModuleType) -> bool:
    """Is there nothing of ours around it?"""
    return not written_in(resolve(fsdp, "fully_shard"), int8_params.__name__)


def patch(fsdp: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(fsdp, "fully_shard", int8_params.refuses_to_shard)
