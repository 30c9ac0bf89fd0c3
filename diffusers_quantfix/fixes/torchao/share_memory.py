"""share_memory() of a model with torchao weights ends the process.

Symptom: Segmentation fault in ``model.share_memory()`` of a torchao model, before processes are started that use it;
    ``weight.is_shared()`` is False for weights whose bytes are shared.
Cause: as for quanto (``quanto-share-memory``): torch copies a storage that has a size and no memory.
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
    id="torchao-share-memory",
    module="torchao.utils",
    claims={"torchao": ">=0.15.0,<=0.18.0"},
    patterns=(r"Segmentation fault.{0,4000}\bin share_memory_\b.{0,400}\btorchao\b",),
    frames=("share_memory", "torchao"),
    hot=True,
)


def broken(utils: ModuleType) -> bool:
    return is_torchs(resolve(utils, "TorchAOBaseTensor"))


def patch(utils: ModuleType, draft: Draft) -> None:
    cls = resolve(utils, "TorchAOBaseTensor")
    draft.wrap_plain(cls, "share_memory_", sharing_the_inner)
    draft.wrap_plain(cls, "is_shared", asking_the_inner)
