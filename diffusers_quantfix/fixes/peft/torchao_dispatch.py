"""A LoRA cannot be loaded alongside some torchao releases, nor fused into some of its weights.

Symptom: after ``torchao.quantize_(model, ...)`` ``load_lora_weights`` raises TypeError "TorchaoLoraLinear.__init__()
    missing 1 required keyword-only argument: 'get_apply_tensor_subclass'". For any model, quantized or not, it raises
    ImportError "cannot import name 'LinearActivationQuantizedTensor'" (torchao 0.18, peft before 0.19) or "Found an
    incompatible version of torchao" (torchao before 0.16, peft from 0.19 on). ``fuse_lora()`` raises
    NotImplementedError "Float8Tensor dispatch: attempting to run unimplemented operator" (peft before 0.19).
Cause: ``dispatch_torchao`` is called for every layer that no other backend accepts, and checks torchao before it checks
    the weight. Its layer needs the quantization config, which only a model quantized by transformers or diffusers has.
    Before peft 0.19 it knows only two of torchao's classes; other weights get the layer for plain ones, which cannot
    merge.
Upstream: https://github.com/huggingface/peft/issues/2285 and https://github.com/huggingface/peft/issues/3223, fixed by
    https://github.com/huggingface/peft/pull/3234 (0.20.0); https://github.com/huggingface/peft/pull/3101 (0.19.0); the
    version check for plain layers is open.
Patch: ``dispatch_torchao`` handles only torchao weights, but all of them, and needs no config. Without one a LoRA can
    be loaded, run and trained; merging it raises ValueError before anything is changed, as in 0.20.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve

FIX = Fix(
    __doc__,
    id="peft-torchao-dispatch",
    module="peft.tuners.lora.torchao",
    claims={"peft": ">=0.14.0,<=0.21.2", "torchao": ""},
    patterns=(
        r"TorchaoLoraLinear\.__init__\(\) missing 1 required keyword-only argument: 'get_apply_tensor_subclass'",
        "cannot import name 'LinearActivationQuantizedTensor'",
        "Found an incompatible version of torchao",
        r"\w{1,40}Tensor dispatch: attempting to run unimplemented operator/function: .{0,40}aten\.add_",
    ),
    frames=(
        "peft/tuners/lora/torchao.py:dispatch_torchao",
        "peft/import_utils.py:is_torchao_available",
        "fuse_lora",
    ),
    asked_once=True,
)

_CONFIG = "get_apply_tensor_subclass"


def broken(torchao: ModuleType) -> bool:
    """Does its layer need a config, or is a plain layer refused with the installed torchao?"""
    init = function_of(resolve(torchao, "TorchaoLoraLinear.__init__"))
    if _CONFIG in init.__code__.co_varnames and _CONFIG not in (init.__kwdefaults__ or {}):
        return True
    try:
        torchao.is_torchao_available()
    except ImportError:
        return True
    return False


def patch(torchao: ModuleType, draft: Draft) -> None:
    import torch

    layer_class, tuner_class = torchao.TorchaoLoraLinear, torchao.BaseTunerLayer

    def make_dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch_torchao(target: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
            base = target.get_base_layer() if isinstance(target, tuner_class) else target
            if not _is_packed(base):
                return None
            kwargs.setdefault(_CONFIG, None)
            try:
                layer = original(target, adapter_name, *args, **kwargs)
            except ImportError:
                torchao.is_torchao_available()  # raises if peft refuses this torchao
                layer = None  # this torchao no longer has the class
            if layer is None and type(base) is torch.nn.Linear and not kwargs.get("lora_bias"):
                kwargs.pop("lora_config", None)
                layer = layer_class(target, adapter_name, **kwargs)
            return layer

        return dispatch_torchao

    draft.wrap_plain(torchao, "dispatch_torchao", make_dispatch)
    for verb in ("merge", "unmerge"):
        draft.wrap_plain(layer_class, verb, _refusing(verb))


def _is_packed(layer: Any) -> bool:
    """Whether a layer's weight is torchao's; torchao is imported if any is."""
    base_tensor = getattr(sys.modules.get("torchao.utils"), "TorchAOBaseTensor", None)
    return base_tensor is not None and isinstance(getattr(layer, "weight", None), base_tensor)


def _refusing(verb: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps ``merge`` or ``unmerge`` to refuse: without a config the weight could not be quantized again."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def merge_or_unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.get_apply_tensor_subclass is None and _has_work(self, verb, *args, **kwargs):
                raise ValueError(
                    f"{type(self).__name__} cannot {verb} an adapter: its weight was quantized by"
                    " `torchao.quantize_()`, and the config is not known. Let diffusers or transformers quantize the"
                    " model (`quantization_config=TorchAoConfig(...)`), or fuse the adapter first and then quantize."
                )
            return original(self, *args, **kwargs)

        return merge_or_unmerge

    return wrap


def _has_work(adapter: Any, verb: str, safe_merge: bool = False, adapter_names: Any = None) -> bool:
    if verb == "unmerge":
        return bool(adapter.merged_adapters)
    names = adapter.active_adapters if adapter_names is None else adapter_names
    return any(name in adapter.lora_A and name not in adapter.merged_adapters for name in names)
