"""After a move, hooks send an 8-bit model's inputs to its old device.

Symptom: RuntimeError "Expected all tensors to be on the same device" from an 8-bit model after it was moved.
Cause: accelerate before 1.13.0 puts hooks on every module of an 8-bit model; they send the inputs to the device it was
    loaded on. diffusers 0.37.0 allows moving the model, but does not update the hooks.
Upstream: https://github.com/huggingface/diffusers/pull/12972; accelerate 1.13.0 puts no hooks on them.
Patch: after a move by ``ModelMixin.to`` or ``.cuda``, the hooks that only align inputs send them to the new device.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, texts_of
from ...models import eight_bit

FIX = Fix(
    __doc__,
    id="diffusers-8bit-hooks-follow",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.37.0,<=0.42.1", "accelerate": "<1.13.0", "bitsandbytes": ">=0.48.0"},
    patterns=("Expected all tensors to be on the same device",),
    frames=("8.?bit|int8", "accelerate/hooks.py:new_forward", "embedding|index_select"),
    fixed_in="accelerate 1.13.0",
    asked_once=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """``ModelMixin.to`` ignores hooks. Does it move 8-bit models, and does accelerate put hooks on them?"""
    from accelerate import big_modeling

    to = resolve(modeling_utils, "ModelMixin.to")
    if "`.to` is not supported for `8-bit`" in texts_of(to):
        return False
    if modeling_utils.is_bitsandbytes_version("<", "0.48.0"):
        return False  # refused as well
    # From this bitsandbytes release on, accelerate leaves moving the model to the user.
    return "0.48.0" not in texts_of(resolve(big_modeling, "dispatch_model"))


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    def make_to(original):
        def to(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if eight_bit.is_8bit(self) and eight_bit.can_move(self):
                eight_bit.align(self)
            return result

        return to

    def make_cuda(original):
        def cuda(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if eight_bit.is_8bit(self) and eight_bit.can_move(self):
                eight_bit.align(self)
            return result

        return cuda

    model = resolve(modeling_utils, "ModelMixin")
    draft.wrap_plain(model, "to", make_to)
    draft.wrap_plain(model, "cuda", make_cuda)
