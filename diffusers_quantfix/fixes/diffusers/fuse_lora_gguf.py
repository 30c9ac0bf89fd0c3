"""``fuse_lora`` of a GGUF model fails halfway.

Symptom: RuntimeError "The size of tensor a (36) must match the size of tensor b (64) at non-singleton dimension 1", or
    another pair of sizes, from ``fuse_lora()`` of a GGUF model. Layers that the file keeps unquantized are already
    merged by then.
Cause: peft adds the LoRA's product to the packed bytes, whose rows have a different length.
Upstream: https://github.com/huggingface/diffusers/issues/12047 (open).
Patch: a clear error, before anything is merged; `adapters.merging_gguf` says why. It names the way to merge:
    ``diffusers_quantfix.dequantize_lora_layers()`` dequantizes only the layers that change.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_gguf import refuse_merge
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...weights.gguf import knows_gguf

FIX = Fix(
    __doc__,
    id="diffusers-fuse-lora-gguf",
    module="diffusers.loaders.peft",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "peft": "", "gguf": ""},
    # Anchored at the start: trying a match at every "gguf" of a long log takes quadratic time.
    patterns=(
        r"\A(?=.*gguf).*The size of tensor a .{0,20}must match the size of tensor b",
        r"\bfus(e|ing) .{0,40}lora .{0,40}\bgguf",
    ),
    frames=("fuse_lora", "GGUF"),
    asked_once=True,
)


def broken(peft: ModuleType) -> bool:
    """Does it not mention GGUF?"""
    if not knows_gguf():
        return False
    fuse = resolve(peft, "PeftAdapterMixin.fuse_lora")
    return not any(
        "gguf" in name.lower()
        for function in (fuse, resolve(peft, "PeftAdapterMixin._fuse_lora_apply"))
        for name in names_used(function)
    )


def patch(peft: ModuleType, draft: Draft) -> None:
    def make(original):
        def fuse_lora(self, *args, **kwargs):
            refuse_merge(self, "a LoRA", "fuse_lora()")
            return original(self, *args, **kwargs)

        return fuse_lora

    draft.wrap_plain(resolve(peft, "PeftAdapterMixin"), "fuse_lora", make)
