"""``PreTrainedModel.cuda`` returns None if its weights are in 4 bits.

Symptom: AttributeError "'NoneType' object has no attribute 'requires_grad_'", 'eval' or another after ``encoder =
    T5EncoderModel.from_pretrained(..., load_in_4bit=True).cuda()``. Its weights are where they were.
Cause: ``PreTrainedModel.cuda`` calls ``torch.nn.Module.cuda`` only for models that bitsandbytes has not quantized.
Upstream: https://github.com/huggingface/transformers/pull/33122, in 4.45.0, is the cause; 4.53.0 calls it for all.
Patch: where upstream returns None, having refused nothing, torch's method is called, unless the model is spread over
    devices or offloaded.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.eight_bit import can_move

FIX = Fix(
    __doc__,
    id="transformers-4bit-cuda",
    module="transformers.modeling_utils",
    claims={"transformers": ">=4.45.0,<4.53.0", "bitsandbytes": ">=0.43.2"},
    harm="wrong result",
    patterns=(
        r"'NoneType' object has no attribute '(config|device|dtype|encoder|eval|get_input_embeddings|requires_grad_)'",
    ),
    frames=(r"from_pretrained\(.{0,400}\)\.cuda\(",),
    fixed_in="transformers 4.53.0",
    since="0.1.0",
)


def broken(modeling_utils: ModuleType) -> bool:
    """Call it for what only says that it is a 4-bit model: torch's method would refuse that."""
    cuda = resolve(modeling_utils, "PreTrainedModel.cuda")
    try:
        return cuda(_FourBit(modeling_utils)) is None
    except (TypeError, ValueError):
        return False


class _FourBit:
    """A stand-in for a 4-bit model without layers, with what upstream's method and ours read."""

    is_loaded_in_8bit = False
    is_loaded_in_4bit = True
    device = "cpu"

    def __init__(self, modeling_utils: ModuleType) -> None:
        self.quantization_method = modeling_utils.QuantizationMethod.BITS_AND_BYTES

    def modules(self) -> tuple[()]:
        return ()

    parameters = modules


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    cls = resolve(modeling_utils, "PreTrainedModel")

    def make(original):
        def cuda(self, *args, **kwargs):
            moved = original(self, *args, **kwargs)
            if moved is not None or not can_move(self):
                return moved
            return super(cls, self).cuda(*args, **kwargs)

        return cuda

    draft.wrap_plain(cls, "cuda", make)
