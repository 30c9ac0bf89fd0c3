"""A quantization config with skipped modules is changed by every model that is loaded with it.

Symptom: ``llm_int8_skip_modules`` or ``modules_to_not_convert`` has grown after ``from_pretrained``. The next model
    with that config has fewer quantized layers than alone, without a message.
Cause: the quantizers add the names of what a model keeps in float32 (Wan: norm1, norm2, norm3) or on the CPU to the
    list of the config itself.
Upstream: not reported; ``_process_model_before_weight_loading`` in diffusers/quantizers.
Patch: a config that has lists is copied, with its lists, for each model.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from types import MemberDescriptorType, ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.interruptions import heed_interruption
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="diffusers-shared-quantization-config",
    targets=(
        Target(
            "diffusers-pretrained-config",
            "diffusers.models.modeling_utils",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
        Target(
            "diffusers-single-file-config",
            "diffusers.loaders.single_file_model",
            {"diffusers": ">=0.32.0,<=0.42.1"},
        ),
    ),
    harm="memory or time",
    patterns=(
        r"(llm_int8_skip_modules|modules_to_not_convert).{0,120}(has grown|grows|was changed|is changed)",
    ),
    frames=("quantizers/.*_process_model_before_weight_loading",),
    asked_once=True,
)

_METHODS = {
    "diffusers.models.modeling_utils": ("ModelMixin", "from_pretrained"),
    "diffusers.loaders.single_file_model": ("FromOriginalModelMixin", "from_single_file"),
}
_CONFIG = "quantization_config"


def broken(module: ModuleType) -> bool:
    """Does the quantizer for 4 bits extend a list? A trial would import bitsandbytes."""
    resolve(module, ".".join(_METHODS[module.__name__]))
    auto = sys.modules[resolve(module, "DiffusersAutoQuantizer").__module__]
    return "extend" in names_used(
        resolve(auto, "BnB4BitDiffusersQuantizer._process_model_before_weight_loading")
    )


def patch(module: ModuleType, draft: Draft) -> None:
    owner, method = _METHODS[module.__name__]

    def make(original):
        def load(cls, *args, **kwargs):
            if kwargs.get(_CONFIG) is not None:
                kwargs[_CONFIG] = _with_own_lists(kwargs[_CONFIG])
            return original(cls, *args, **kwargs)

        return load

    draft.wrap_plain(resolve(module, owner), method, make)


def _with_own_lists(config: Any) -> Any:
    """A copy of ``config``, which may be a dict, with copies of its lists; ``config`` itself if it has none."""
    held = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    lists = {name: _copied(value) for name, value in held.items() if isinstance(value, list)}
    if not lists:
        return config
    if isinstance(config, dict):
        try:
            own = copy.copy(config)  # of its class
            if own is not config:
                own.update(lists)
                return own
        except Exception as error:  # a user's class, or one that cannot be changed
            heed_interruption(error)
        return {**config, **lists}
    try:
        own = object.__new__(type(config))  # `copy.copy` asks a user's class, which may do other things
    except TypeError:  # it derives from a built-in type, too
        return config
    vars(own).update(held, **lists)
    for base in type(config).__mro__:
        for slot in vars(base).values():
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    slot.__set__(own, slot.__get__(config))
    return own


def _copied(value: list[Any]) -> list[Any]:
    if type(value) is not list:
        try:
            return copy.copy(value)  # of its class
        except Exception as error:
            heed_interruption(error)
    return list(value)
