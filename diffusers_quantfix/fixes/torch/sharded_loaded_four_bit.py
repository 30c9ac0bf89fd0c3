"""FSDP loses the quant states of a model that diffusers loaded in 4-bit.

Symptom: ValueError "quant_state is required" (before bitsandbytes 0.50 an AssertionError without a message) in the
    first run after ``fully_shard`` or ``FullyShardedDataParallel``. A model quantized while loading is not affected.
Cause: FSDP replaces each parameter with one of its own class, and the quant state is an attribute of the old one.
    bitsandbytes recovers it from ``layer.quant_state``, but this is None because diffusers does not pass the layer to
    ``Params4bit.from_prequantized`` (transformers does).
Upstream: not reported; diffusers/quantizers/bitsandbytes/bnb_quantizer.py (``create_quantized_param``).
Patch: before sharding, both functions let such layers refer to the quant states of their weights. The loader is not
    patched: the weight would have to know its layer too, and such a cycle keeps a deleted model's memory until Python
    collects it.
"""

from __future__ import annotations

from types import CodeType, ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import function_of, nested_code, resolve
from ...engine.target import finished

FIX = Fix(
    __doc__,
    id="torch-sharded-loaded-4bit",
    module="torch.distributed.fsdp",
    claims={
        "torch": ">=2.5.1,<=2.15.0",
        "diffusers": ">=0.31.0,<=0.42.1",
        "bitsandbytes": ">=0.43.3,<=0.50.2",
    },
    patterns=("quant_state is required", r"fsdp.{0,4000}fix_4bit_weight_quant_state_from_module"),
    frames=("fully_shard|fsdp", "4.?bit"),
    since="0.1.0",
    asked_once=True,
)

_LOADER = "diffusers.quantizers.bitsandbytes.bnb_quantizer"
_CLASS, _METHOD = "BnB4BitDiffusersQuantizer", "create_quantized_param"


def broken(fsdp: ModuleType) -> bool:
    """Does diffusers not pass the layer when it makes the weight?

    It does not wait for the loader: a direct import of ``fully_shard`` before it would keep the unpatched function.
    """
    loader = finished(_LOADER)
    if loader is None:
        code = nested_code(nested_code(_code_on_disk(), _CLASS), _METHOD)
    else:  # diffusers' own, below the wrappers of other fixes
        code = function_of(resolve(loader, f"{_CLASS}.{_METHOD}")).__code__
    return not any("module" in names for names in code.co_consts if isinstance(names, tuple))


def _code_on_disk() -> CodeType:
    """The loader's code, without importing diffusers."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    library, *folders, _ = _LOADER.split(".")
    found = find_spec(library)
    for place in (found and found.submodule_search_locations) or ():
        spec: Any = PathFinder.find_spec(_LOADER, ["/".join((place, *folders))])
        code = spec and spec.loader and spec.loader.get_code(_LOADER)
        if isinstance(code, CodeType):
            return code
    raise TargetMissing(f"there is no {_LOADER}")


def patch(fsdp: ModuleType, draft: Draft) -> None:
    def make_init(original):
        def __init__(self, module, *args, **kwargs):
            tell(module)
            original(self, module, *args, **kwargs)

        return __init__

    def make(original):
        def fully_shard(module, *args, **kwargs):
            for part in module if isinstance(module, (list, tuple)) else [module]:
                tell(part)
            return original(module, *args, **kwargs)

        return fully_shard

    def tell(model):
        for layer in model.modules():
            held = vars(layer)
            if "quant_state" in held and held["quant_state"] is None:
                layer.quant_state = getattr(layer._parameters.get("weight"), "quant_state", None)

    draft.wrap_plain(resolve(fsdp, "FullyShardedDataParallel"), "__init__", make_init)
    if hasattr(fsdp, "fully_shard"):  # from torch 2.6 on
        draft.wrap_plain(fsdp, "fully_shard", make)
