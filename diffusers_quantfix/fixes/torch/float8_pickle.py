"""Pickled float8 weights cannot be read.

Symptom: AttributeError "type object 'torch.storage.UntypedStorage' has no attribute 'dtype'" from ``pickle.loads`` of a
    model with float8 weights of torchao or quanto, or of the state dict of a model after ``enable_layerwise_casting``.
    ``pickle.dumps`` raises nothing. So too with joblib, Ray and whatever else sends models by pickle, and with
    ``torch.load`` of a file in torch's old format. Other files of ``torch.save`` are not affected.
Cause: the storages of newer dtypes are pickled without a type, in the old format. ``_legacy_load`` asks the type that
    was stored for its dtype, and here there is none.
Upstream: not reported; ``_load``, for the present format, takes such storages for uint8, and
    https://github.com/pytorch/pytorch/pull/143930 proposed the same for ``torch.package``.
Patch: ``_legacy_load`` takes them for uint8 too. What was pickled before can be read as well, in a process that has
    imported diffusers. A file in the old format still cannot be read with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="torch-float8-pickle",
    module="diffusers.utils",  # which `import diffusers` imports; torch alone does not activate the package
    claims={"torch": ">=2.5.1,<=2.15.0", "diffusers": ""},
    patterns=(r"torch\.storage\.UntypedStorage' has no attribute 'dtype'",),
    frames=("torch/serialization.py:persistent_load", "torch/storage.py:_load_from_bytes"),
    asked_once=True,
)

_LOAD = "_legacy_load"


def broken(utils: ModuleType) -> bool:
    """Does the old format know no uint8, as the present one does? A trial would import modules of torch."""
    import torch

    return "uint8" not in names_used(resolve(torch, f"serialization.{_LOAD}"))


def patch(utils: ModuleType, draft: Draft) -> None:
    import torch

    serialization, untyped = torch.serialization, torch.UntypedStorage
    # What torch reads a stored type as: it has a dtype.
    uint8 = resolve(serialization, "StorageType")("ByteStorage")
    weights_only = resolve(serialization, "_weights_only_unpickler")

    def typed(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def persistent_load(stored):
            if isinstance(stored, tuple) and stored[1:2] == (untyped,):
                stored = (stored[0], uint8, *stored[2:])
            return load(stored)

        return persistent_load

    def reader(pickle_module: Any) -> Any:
        class Unpickler(pickle_module.Unpickler):
            def __setattr__(self, name, value):
                super().__setattr__(name, typed(value) if name == "persistent_load" else value)

        return SimpleNamespace(Unpickler=Unpickler, load=pickle_module.load)

    usual = reader(pickle)

    def make(original):
        def _legacy_load(f, map_location, pickle_module, **pickle_load_args):
            # By the module for weights only torch knows that a tar archive is to be refused.
            if pickle_module is not weights_only:
                pickle_module = usual if pickle_module is pickle else reader(pickle_module)
            return original(f, map_location, pickle_module, **pickle_load_args)

        return _legacy_load

    draft.wrap_plain(serialization, _LOAD, make)
