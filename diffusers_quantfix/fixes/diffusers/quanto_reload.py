"""A saved model with quanto weights is on meta after loading.

Symptom: after ``from_pretrained`` of such a checkpoint ``model.device`` is ``meta``; a pipeline on the CPU raises
    RuntimeError "Tensor on device cpu is not on the expected device meta!", sequential offload NotImplementedError
    "Cannot copy out of meta tensor; no data!". After ``.to(device)`` it works.
Cause: the model is created with quantized weights on meta, and ``QuantoQuantizer.create_quantized_param`` puts the
    loaded tensors inside them. The device of a tensor subclass is fixed when it is created.
Upstream: not reported; diffusers drops quanto with 1.0.
Patch: after loading, such weights are rebuilt from their tensors.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-quanto-reload",
    module="diffusers.quantizers.quanto.quanto_quantizer",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        "is not on the expected device meta",
        r"Tensor\.item\(\) cannot be called on meta tensors",
        r"KeyError: '[\w.]*embedder\.weight'",
        "model is on meta",
    ),
    frames=("quanto", "from_pretrained"),
)

_METHOD = "_process_model_after_weight_loading"


def broken(quanto_quantizer: ModuleType) -> bool:
    """Are the weights left unchanged after loading?"""
    return not resolve(quanto_quantizer, f"QuantoQuantizer.{_METHOD}").__code__.co_names


def patch(quanto_quantizer: ModuleType, draft: Draft) -> None:
    def make(original):
        def _process_model_after_weight_loading(self, model, **kwargs):
            model = original(self, model, **kwargs)
            from ...models.quanto_layers import remade_where_loaded

            remade_where_loaded(model)
            return model

        return _process_model_after_weight_loading

    draft.wrap_plain(resolve(quanto_quantizer, "QuantoQuantizer"), _METHOD, make)
