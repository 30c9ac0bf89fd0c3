"""HRA, PEANuT and MiSS adapters treat int8 codes as weights.

Symptom: the output of an 8-bit bitsandbytes model with an HRA, PEANuT, MiSS or Bone is a million times too large,
    without an error. Merging does not matter. The last two are affected before 0.20, with ``init_weights="bat"``. With
    an HRA in 0.15 and before RuntimeError "expected m1 and m2 to have the same dtype". With 4-bit and GGUF weights
    RuntimeError "mat1 and mat2 shapes cannot be multiplied" at the first run.
Cause: the ``forward`` of their layers computes with the base layer's ``weight.data``; that of ``Linear8bitLt`` is int8
    codes from -127 to 127, without their row scales. That of 4-bit and GGUF weights has a different shape.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/hra/layer.py; not reported; 0.20.0
    dequantizes for MiSS.
Patch: a clear error when such an adapter would be added to such a layer, before anything is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="peft-int8-raw-weight",
    module="peft.tuners",
    claims={"peft": ">=0.13.2,<=0.21.2", "bitsandbytes": ""},
    harm="wrong result",
    frames=(r"\b(HRA|PEANuT|Peanut|MiSS|Bone)(Config)?\b", "Linear8bitLt|load_in_8bit|8.?bit|int8"),
    asked_once=True,
)

# The tuner's module, the method of its layer that computes, and the affected init_weights (None: all).
_KINDS = (
    ("hra", "HRALinear.forward", None),
    ("peanut", "Linear.get_delta_weight", None),
    ("miss", "MissLinear.forward", "bat"),
    ("bone", "BoneLinear.forward", "bat"),
)


def broken(tuners: ModuleType) -> bool:
    """Does a kind of adapter compute with a weight's raw numbers?"""
    resolve(tuners, "tuners_utils.BaseTuner.inject_adapter")
    return any(True for _ in _affected(tuners))


def patch(tuners: ModuleType, draft: Draft) -> None:
    tuners_utils = resolve(tuners, "tuners_utils")
    affected = {f"{tuners.__name__}.{kind}.model": weights for kind, weights in _affected(tuners)}

    def refusing(original):
        def inject_adapter(self, model, adapter_name, *args, **kwargs):
            kind = next((cls.__module__ for cls in type(self).__mro__ if cls.__module__ in affected), None)
            if kind is not None:
                only, config = affected[kind], self.peft_config[adapter_name]
                if only is None or getattr(config, "init_weights", None) == only:
                    state_dict = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
                    _refuse(self, model, config, only, state_dict, tuners_utils)
            return original(self, model, adapter_name, *args, **kwargs)

        return inject_adapter

    draft.wrap_plain(resolve(tuners_utils, "BaseTuner"), "inject_adapter", refusing)


def _affected(tuners: ModuleType) -> Iterator[tuple[str, str | None]]:
    for kind, computes, weights in _KINDS:
        try:
            names = names_used(resolve(tuners, f"{kind}.layer.{computes}"))
        except TargetMissing:
            continue
        if "weight" in names and "get_base_weight" not in names:
            yield kind, weights


def _refuse(
    tuner: Any, model: Any, config: Any, only: str | None, state_dict: Any, tuners_utils: ModuleType
) -> None:
    """Raise if the adapter is for a quantized layer.

    Raises:
        ValueError: it is; names the layer.
    """
    import copy

    quantized = {}
    for name, module in model.named_modules():
        base = module.get_base_layer() if isinstance(module, tuners_utils.BaseTunerLayer) else module
        kind = _kind_of(base)
        if kind:
            quantized[name] = kind
    if not quantized:
        return
    if state_dict is not None:
        targets = {key.rsplit(f".{tuner.prefix}", 1)[0] for key in state_dict}
        found = [name for name in quantized if name in targets]
    else:
        # The config as peft would resolve it: the architecture's default targets, "all-linear".
        config = tuner._prepare_adapter_config(copy.copy(config), tuner.get_model_config(model))
        config = tuners_utils._maybe_include_all_linear_layers(copy.copy(config), model)
        found = [name for name in quantized if tuner._check_target_module_exists(config, name)]
    if found:
        kind = quantized[found[0]]
        numbers = "8-bit numbers" if kind == "8-bit" else "packed bytes"
        ends = "the output would be wrong" if kind == "8-bit" else "the first run would fail"
        other = "" if only is None else f", another init_weights than {only!r}"
        raise ValueError(
            f"a {type(config).__name__.removesuffix('Config')} adapter with init_weights={config.init_weights!r} "
            f"cannot be added to {found[0]!r}, {'an' if kind == '8-bit' else 'a'} {kind} layer: it would use the "
            f"{numbers} of its weight as the weight, and {ends}. Use a LoRA{other}, leave {kind} layers out of "
            "target_modules, load the model without quantization, or call the model's dequantize() before the "
            "adapter is added"
        )


def _kind_of(layer: Any) -> str:
    """How the weight of ``layer`` is quantized, in a word; empty if it is not, or not in a form that matters."""
    weight = getattr(layer, "weight", None)
    name = type(weight).__name__
    # One that is not quantized yet will be, unless it keeps float16 weights.
    if name == "Int8Params" and not getattr(weight, "has_fp16_weights", False):
        return "8-bit"
    if weight is not None and name in ("Params4bit", "GGUFParameter") and hasattr(layer, "in_features"):
        # Before it is packed, upstream can compute with it.
        packed = tuple(weight.shape) != (layer.out_features, layer.in_features)
        return {"Params4bit": "4-bit", "GGUFParameter": "GGUF"}[name] if packed else ""
    return ""
