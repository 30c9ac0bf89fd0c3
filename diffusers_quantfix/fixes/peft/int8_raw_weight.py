"""An HRA, PEANuT or MiSS takes the 8-bit numbers of a weight for the weight.

Symptom: the output of an 8-bit bitsandbytes model with an HRA, PEANuT, MiSS or Bone is a million times too large,
    without an error. It is so merged or not. The last two have it before 0.20, with ``init_weights="bat"``. With an HRA
    in 0.15 and before RuntimeError "expected m1 and m2 to have the same dtype". With 4-bit and GGUF weights
    RuntimeError "mat1 and mat2 shapes cannot be multiplied" at the first run.
Cause: ``forward`` of their layers computes with ``weight.data`` of the layer below; that of ``Linear8bitLt`` has int8
    numbers from -127 to 127, without the scales of their rows. Those of 4-bit and GGUF weights have another shape.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/hra/layer.py; not reported; 0.20.0
    dequantizes for MiSS.
Patch: a clear error where such an adapter is to be added to such a layer, before anything is added.
"""

from __future__ import annotations

from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve, written_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    __doc__,
    id="peft-int8-raw-weight",
    module="peft.tuners",
    claims={"peft": ">=0.13.2,<=0.21.2", "bitsandbytes": ""},
    harm="wrong result",
    frames=(r"\b(HRA|PEANuT|Peanut|MiSS|Bone)(Config)?\b", "Linear8bitLt|load_in_8bit|8.?bit|int8"),
)

# The tuner's module, what computes in its layer, and the init_weights that do so; None: whatever they are.
_KINDS = (
    ("hra", "HRALinear.forward", None),
    ("peanut", "Linear.get_delta_weight", None),
    ("miss", "MissLinear.forward", "bat"),
    ("bone", "BoneLinear.forward", "bat"),
)


def broken(tuners: ModuleType) -> bool:
    """Does a kind of adapter compute with the numbers of a weight, and does nothing of ours look at that?"""
    inject = resolve(tuners, "tuners_utils.BaseTuner.inject_adapter")
    return not written_in(inject, __name__) and any(True for _ in _affected(tuners))


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
        if not hasattr(tuners, kind):
            continue
        try:
            names = names_used(resolve(tuners, f"{kind}.layer.{computes}"))
        except TargetMissing:
            continue
        if "weight" in names and "get_base_weight" not in names:
            yield kind, weights


def _refuse(
    tuner: Any, model: Any, config: Any, only: str | None, state_dict: Any, tuners_utils: ModuleType
) -> None:
    """Raise where the adapter is for a quantized layer.

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
        # The copies are what peft would make of the config: default targets of an architecture, "all-linear".
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
            f"cannot be added to {found[0]!r}, {'an' if kind == '8-bit' else 'a'} {kind} layer: it would take the "
            f"{numbers} of its weight for the weight, and {ends}. Use a LoRA{other}, leave {kind} layers out of "
            "target_modules, load the model without quantization, or call dequantize() of the model before the "
            "adapter is added"
        )


def _kind_of(layer: Any) -> str:
    """How the weight of ``layer`` is quantized, in a word; empty where it is not, or not in a form that matters."""
    weight = getattr(layer, "weight", None)
    name = type(weight).__name__
    # One that is not quantized yet will be, unless it has float16 weights for good.
    if name == "Int8Params" and not getattr(weight, "has_fp16_weights", False):
        return "8-bit"
    if weight is not None and name in ("Params4bit", "GGUFParameter") and hasattr(layer, "in_features"):
        # Before it is packed upstream computes with it.
        packed = tuple(weight.shape) != (layer.out_features, layer.in_features)
        return {"Params4bit": "4-bit", "GGUFParameter": "GGUF"}[name] if packed else ""
    return ""
