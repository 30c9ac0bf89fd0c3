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

from ...engine.fix import Fix
from ...engine.probe import resolve, written_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ...engine.draft import Draft

FIX = Fix(
    id="torch-fully-shard-8bit",
    title="fully_shard destroys an 8-bit model",
    module="torch.distributed.fsdp",
    claims={"torch": ">=2.6.0,<=2.15.0", "bitsandbytes": ">=0.43.0,<=0.50.2"},
    upstream=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1709",),
    symptom="AttributeError: 'Parameter' object has no attribute 'CB', in the first run after fully_shard",
    patterns=("'Parameter' object has no attribute 'CB'",),
    frames=("fully_shard|fsdp",),
    since="0.1.0",
)


def broken(fsdp: ModuleType) -> bool:
    """Is there nothing of ours around it?"""
    return not written_in(resolve(fsdp, "fully_shard"), __file__)


def patch(fsdp: ModuleType, draft: Draft) -> None:
    def make(original):
        def fully_shard(module, *args, **kwargs):
            ignored = {id(one) for one in kwargs.get("ignored_params") or ()}
            modules = module if isinstance(module, (list, tuple)) else [module]
            parameters = (one for part in modules for one in part.parameters())
            count = len({id(one) for one in parameters if type(one).__name__ == "Int8Params"} - ignored)
            if count:
                raise ValueError(
                    f"fully_shard cannot shard the 8-bit weights of bitsandbytes ({count} in what is to be sharded), "
                    "their scales would be lost: pass them to each call of fully_shard as `ignored_params`, then every "
                    "process keeps them whole, or load the model in 4 bits with a floating `bnb_4bit_quant_storage`"
                )
            return original(module, *args, **kwargs)

        return fully_shard

    draft.wrap_plain(fsdp, "fully_shard", make)
