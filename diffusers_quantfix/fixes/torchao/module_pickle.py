"""Models with weights of torchao cannot be pickled.

Symptom: AttributeError "'functools.partial' object has no attribute '__name__'" from ``pickle.dumps(model)``,
    ``torch.save(model)``, or a model that is handed to a process that is spawned.
Cause: ``quantize_`` gives each layer an ``extra_repr`` that is a method of a ``functools.partial``; pickle stores a
    method by the name of its function.
Upstream: not reported.
Patch: these partials have the name ``extra_repr``. A model that was pickled has the ``extra_repr`` of its class.
"""

from __future__ import annotations

import functools

from ...engine.fix import Fix
from ...engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ...engine.draft import Draft

FIX = Fix(
    id="torchao-module-pickle",
    title="models with weights of torchao cannot be pickled",
    module="torchao.quantization.quant_api",
    claims={"torchao": ">=0.15.0,<=0.18.0"},
    upstream=("https://github.com/pytorch/ao/blob/v0.18.0/torchao/quantization/quant_api.py#L517",),
    symptom="AttributeError: 'functools.partial' object has no attribute '__name__', from pickle or torch.save of a "
    "model",
    patterns=(r"'functools\.partial' object has no attribute '__name__'",),
    frames=("torchao", "pickle|torch/serialization.py"),
    since="0.1.0",
)


class ExtraRepr(functools.partial[str]):
    """A ``functools.partial`` that pickle can name, as a method of a module."""

    __name__ = "extra_repr"


def broken(quant_api: ModuleType) -> bool:
    resolve(quant_api, "_module_extra_repr")
    return not hasattr(resolve(quant_api, "partial")(print), "__name__")


def patch(quant_api: ModuleType, draft: Draft) -> None:
    draft.replace(quant_api, "partial", ExtraRepr)
