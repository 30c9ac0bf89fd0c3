"""share_memory() of a model with quanto weights ends the process.

Symptom: Segmentation fault in ``model.share_memory()``, which puts the weights where other processes can read them;
    ``weight.is_shared()`` is False for weights whose bytes are shared.
Cause: torch copies the storage of the tensor. A quanto weight's own storage has a size and no memory; its bytes are
    those of the tensors inside.
Upstream: not reported.
Patch: the tensors inside are moved into shared memory, and asked whether they are there.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.shared_memory import asking_the_inner, is_torchs, sharing_the_inner

FIX = Fix(
    __doc__,
    id="quanto-share-memory",
    module="optimum.quanto.tensor.qtensor",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(r"Segmentation fault.{0,4000}\bin share_memory_\b.{0,400}\bquanto\b",),
    frames=("share_memory", "quanto"),
    hot=True,
)


def broken(qtensor: ModuleType) -> bool:
    return is_torchs(resolve(qtensor, "QTensor"))


def patch(qtensor: ModuleType, draft: Draft) -> None:
    cls = resolve(qtensor, "QTensor")
    draft.wrap_plain(cls, "share_memory_", sharing_the_inner)
    draft.wrap_plain(cls, "is_shared", asking_the_inner)
