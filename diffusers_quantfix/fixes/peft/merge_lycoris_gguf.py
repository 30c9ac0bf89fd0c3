"""``merge_and_unload`` of a LoKr or LoHa of a GGUF model fails halfway.

Symptom: RuntimeError "The size of tensor a (36) must match the size of tensor b (64) at non-singleton dimension 1", or
    another pair of sizes, from ``merge_and_unload()``. Layers that the file keeps unquantized are already merged by
    then.
Cause: as for ``peft-merge-gguf``; before peft 0.18.0 ``LycorisTuner`` has its own ``_unload_and_optionally_merge``,
    which does not call ``_check_merge_allowed``.
Upstream: not reported; for ``fuse_lora`` https://github.com/huggingface/diffusers/issues/12047 (open).
Patch: a clear error before anything is merged, as ``peft-merge-gguf`` raises from peft 0.18.0 on.
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
    id="peft-merge-lycoris-gguf",
    module="peft.tuners.lycoris_utils",
    claims={"peft": ">=0.7.0,<0.18.0", "diffusers": "", "gguf": ""},
    # Anchored at the start: trying a match at every "gguf" of a long log takes quadratic time.
    patterns=(
        r"\A(?=.*gguf)(?=.*(lokr|loha|lycoris)).*The size of tensor a .{0,20}must match the size of tensor b",
    ),
    frames=(
        "lokr|loha|lycoris",
        "lycoris_utils.py:merge_and_unload",
        "lycoris_utils.py:_unload_and_optionally_merge",
        "GGUF",
    ),
    fixed_in="peft 0.18.0",  # together with peft-merge-gguf: the function calls the check there
    since="0.1.0",
    asked_once=True,
)

_NAME = "_unload_and_optionally_merge"


def broken(lycoris_utils: ModuleType) -> bool:
    """Does the class have its own merge function, without the check?"""
    tuner = resolve(lycoris_utils, "LycorisTuner")
    if not knows_gguf() or _NAME not in vars(tuner):
        return False
    own = vars(tuner)[_NAME]
    return "_check_merge_allowed" not in names_used(own)


def patch(lycoris_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def _unload_and_optionally_merge(self, merge=True, *args, **kwargs):
            if merge:
                refuse_merge(self.model, "an adapter", "merge_and_unload()")
            return original(self, merge, *args, **kwargs)

        return _unload_and_optionally_merge

    draft.wrap_plain(resolve(lycoris_utils, "LycorisTuner"), _NAME, make)
