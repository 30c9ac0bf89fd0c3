"""``fuse_lora`` of a GGUF model fails in the middle.

Symptom: RuntimeError "The size of tensor a (36) must match the size of tensor b (64) at non-singleton dimension 1", or
    another pair of sizes, from ``fuse_lora()``. Layers that the file keeps unquantized are merged by then.
Cause: peft adds the product of the LoRA to the packed bytes, whose rows have another length.
Upstream: diffusers issue 12047 (open).
Patch: a clear error, before anything is merged. Most formats of GGUF can only be read here, not written: a merged layer
    would stay dequantized, so that is left to the user, who has ``dequantize()`` for it.
"""

from __future__ import annotations

import sys

from ...engine.fix import Fix
from ...engine.probe import names_used, resolve, written_in
from ...weights.gguf import knows_gguf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-fuse-lora-gguf",
    title="fuse_lora of a GGUF model fails in the middle",
    module="diffusers.loaders.peft",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "peft": "", "gguf": ""},
    upstream=("https://github.com/huggingface/diffusers/issues/12047",),
    symptom="RuntimeError: The size of tensor a must match the size of tensor b, from fuse_lora() of a GGUF model",
    # From the beginning, once: a search from every "gguf" of a long log takes time that grows with its square.
    patterns=(
        r"\A(?=.*gguf).*The size of tensor a .{0,20}must match the size of tensor b",
        r"\bfus(e|ing) .{0,40}lora .{0,40}\bgguf",
    ),
    frames=("fuse_lora", "GGUF"),
)


def broken(peft: ModuleType) -> bool:
    """Is there nothing of GGUF in it, and nothing of ours around it?"""
    if not knows_gguf():
        return False
    fuse = resolve(peft, "PeftAdapterMixin.fuse_lora")
    return not written_in(fuse, __file__) and not any(
        "gguf" in name.lower()
        for function in (fuse, resolve(peft, "PeftAdapterMixin._fuse_lora_apply"))
        for name in names_used(function)
    )


def patch(peft: ModuleType, draft: Draft) -> None:
    def make(original):
        def fuse_lora(self, *args, **kwargs):
            count = sum(is_gguf(layer) for layer in self.modules())
            if count:
                raise ValueError(
                    f"a LoRA cannot be merged into GGUF weights ({count} layers of this {type(self).__name__}); it has "
                    "its effect without fuse_lora(). To merge it, call dequantize() of the model before the LoRA is "
                    "loaded, which takes the memory of the model without quantization"
                )
            return original(self, *args, **kwargs)

        return fuse_lora

    draft.wrap_plain(resolve(peft, "PeftAdapterMixin"), "fuse_lora", make)


def is_gguf(layer: Any) -> bool:
    """Whether it is a layer of peft over one with a GGUF weight."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
    if utils is None or not isinstance(layer, utils.BaseTunerLayer):
        return False
    return type(getattr(layer.get_base_layer(), "weight", None)).__name__ == "GGUFParameter"
