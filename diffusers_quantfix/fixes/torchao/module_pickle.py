"""Models with torchao weights cannot be pickled.

Symptom: AttributeError "'functools.partial' object has no attribute '__name__'" from ``pickle.dumps(model)``,
    ``torch.save(model)``, or a model passed to a spawned process; "'Linear' object has no attribute
    '_linear_extra_repr'" when loading a pickled model: before torchao 0.15, up to 0.16 with ``IntxWeightOnlyConfig``
    and others, and with every torchao if the model comes from a quantized checkpoint of diffusers or transformers,
    or has weights in MX or NVFP4.
Cause: ``quantize_`` gives each layer an ``extra_repr`` that is a method of a ``functools.partial``, or of a function
    outside the class; so do diffusers and transformers when they load weights that are quantized already. Pickle stores
    a method by its function's name.
Upstream: https://github.com/pytorch/ao/blob/v0.18.0/torchao/quantization/quant_api.py#L517; not reported.
Patch: these partials and functions are named ``extra_repr``. An unpickled model has its class's ``extra_repr``. A file
    written without this patch cannot be read with it. A deep copy does not keep the original's
    weights in memory.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix, Target
from ...engine.interruptions import heed_interruption
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="torchao-module-pickle",
    targets=(
        Target("torchao-layer-pickle", "torchao.quantization.quant_api", {"torchao": ">=0.7.0,<=0.18.0"}),
        Target(
            "torchao-pickle-diffusers",
            "diffusers.quantizers.torchao.torchao_quantizer",
            {"diffusers": ">=0.32.0,<=0.42.1", "torchao": ""},
        ),
        Target(
            "torchao-pickle-transformers",
            "transformers.integrations.torchao",
            {"transformers": ">=5.0.0,<=5.24.0", "torchao": ""},
        ),
        Target(
            "torchao-pickle-mx",
            "torchao.prototype.mx_formats.inference_workflow",
            {"torchao": ">=0.15.0,<=0.18.0"},
        ),
    ),
    patterns=(
        r"'functools\.partial' object has no attribute '__name__'",
        r"object has no attribute '_(linear|embedding)_extra_repr'",
    ),
    frames=("torchao", "pickle|torch/serialization.py"),
    since="0.1.0",
)

_NAME = "extra_repr"
_BEFORE = "original_extra_repr"  # the keyword of torchao's function
_FUNCTIONS = ("_linear_extra_repr", "_embedding_extra_repr")


class Module:
    """A module, as pickle stores it: an import."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


class ExtraRepr(functools.partial[str]):
    """A ``functools.partial`` that pickle can name, as a method of a module.

    It is given the module's method of that name before, and keeps the function alone: a copy of the module has the same
    partial, and would keep the original with its weight. A method of another object is kept as it is.

    Cloudpickle and dill, which store the method by this object, get a call of torchao's own ``partial``: a process
    without this package reads it. It has the text from before, instead of the function.
    """

    __name__ = _NAME
    function: Any = None
    text = ""

    def __new__(cls, func: Any, /, *args: Any, **keywords: Any) -> ExtraRepr:
        before = keywords.get(_BEFORE)
        # torchao makes the partial in a function whose `module` is the one that gets it.
        owner = sys._getframe(1).f_locals.get("module")
        if not isinstance(before, MethodType) or before.__self__ is not owner:
            return super().__new__(cls, func, *args, **keywords)
        new = super().__new__(cls, func, *args, **{**keywords, _BEFORE: before.__func__})
        new.function = before.__func__
        try:
            new.text = before()
        except Exception as error:  # a user's layer
            heed_interruption(error)
        return new

    def __call__(self, module: Any, /) -> str:
        if self.function is None:
            return super().__call__(module)
        keywords = {**self.keywords, _BEFORE: MethodType(self.function, module)}
        return self.func(module, *self.args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = self.keywords
        if self.function is not None:
            keywords = {**keywords, _BEFORE: functools.partial(str, self.text)}
        call = operator.methodcaller("partial", self.func, *self.args, **keywords)
        return call, (Module(FIX.targets[0].module),)

    def __copy__(self) -> ExtraRepr:
        return self


def broken(module: ModuleType) -> bool:
    return bool(_named(module))


def patch(module: ModuleType, draft: Draft) -> None:
    for name, new in _named(module).items():
        draft.replace(_home(module, name), name, new)


def _home(module: ModuleType, name: str) -> ModuleType:
    """The module that defines one of these functions: what other modules imported from it is replaced too."""
    held = vars(module)[name]
    home = sys.modules.get(held.__module__) if isinstance(held, FunctionType) else None
    return home if home is not None and vars(home).get(name) is held else module


def _named(module: ModuleType) -> dict[str, Any]:
    """Corrected versions of what makes the methods, by name in the module; without those pickle can already name."""
    held = vars(module)
    functions = [held[name] for name in _FUNCTIONS if name in held]
    partial = "_module_extra_repr" in held
    if not functions and not partial:
        raise TargetMissing(f"{module.__name__} gives layers no extra_repr")
    named: dict[str, Any] = {}
    if partial and not hasattr(resolve(module, "partial")(print), "__name__"):
        named["partial"] = ExtraRepr
    for function in functions:
        if function.__name__ != _NAME:
            new = FunctionType(function.__code__, function.__globals__, _NAME)
            new.__doc__, new.__module__ = function.__doc__, function.__module__
            named[function.__name__] = new
    return named
