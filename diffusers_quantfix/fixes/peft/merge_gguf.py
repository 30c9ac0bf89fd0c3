"""Merging an adapter into a GGUF model with peft fails halfway.

Symptom: RuntimeError "The size of tensor a (36) must match the size of tensor b (64) at non-singleton dimension 1", or
    another pair of sizes, from ``merge_adapter()`` or ``merge_and_unload()``. Layers that the file keeps unquantized
    are already merged by then.
Cause: as for ``diffusers-fuse-lora-gguf``: peft adds the adapter's product to the packed bytes.
Upstream: not reported; for ``fuse_lora`` https://github.com/huggingface/diffusers/issues/12047 (open).
Patch: a clear error, before anything is merged; `adapters.merging_gguf` says why. It names the way to merge:
    ``diffusers_quantfix.dequantize_lora_layers()`` dequantizes only the layers that change.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_gguf import refuse_merge
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401
from ...weights.gguf import knows_gguf

FIX = Fix(
    __doc__,
    id="peft-merge-gguf",
    module="peft.tuners.tuners_utils",
    claims={"peft": ">=0.13.2,<=0.21.2", "diffusers": ">=0.32.0", "gguf": ""},
    # Anchored at the start: trying a match at every "gguf" of a long log takes quadratic time.
    patterns=(r"\A(?=.*gguf).*The size of tensor a .{0,20}must match the size of tensor b",),
    frames=("merge_adapter|merge_and_unload", "GGUF", "peft/"),
    since="0.1.0",
    asked_once=True,
)

_CHECK = "BaseTuner._check_merge_allowed"


def broken(tuners_utils: ModuleType) -> bool:
    """Does peft's check before a merge not mention GGUF?"""
    if not knows_gguf():
        return False
    check = resolve(tuners_utils, _CHECK)
    return not any("gguf" in name.lower() for name in names_used(check))


def patch(tuners_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def _check_merge_allowed(self):
            refuse_merge(self.model, "an adapter", "merge_adapter() and merge_and_unload()")
            original(self)

        return _check_merge_allowed

    draft.wrap_plain(resolve(tuners_utils, "BaseTuner"), "_check_merge_allowed", make)
