"""``fuse_qkv_projections`` of a quantized model fails halfway.

Symptom: RuntimeError "Only Tensors of floating point and complex dtype can require gradients" from
    ``fuse_qkv_projections()`` of a model with bitsandbytes or GGUF weights; NotImplementedError "attempting to run
    unimplemented operator/function" with torchao, "not implemented for 'Float8_e4m3fn'" with layerwise casting.
    Attention layers that are not quantized are already fused by then.
Cause: the weights of the three projections are put into one ``torch.nn.Linear`` as they are: packed.
Upstream: https://github.com/huggingface/diffusers/issues/9165 (closed). Since 0.42 its LoKr loader refuses quantized
    models for this reason.
Patch: a clear error before anything is fused. optimum-quanto weights are left to upstream, which can fuse them.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-fuse-qkv-quantized",
    module="diffusers.models.attention",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    # Anchored at the start: trying a match at every "fuse" of a long log takes quadratic time.
    patterns=(
        r"\A(?=.*fuse_(qkv_)?projections).*("
        "Only Tensors of floating point and complex dtype can require gradients|"
        "attempting to run unimplemented operator/function|check_uniform_bounds. not implemented for)",
    ),
    frames=("fuse_qkv_projections", r"attention\w*\.py:fuse_projections", "aten.cat"),
)

_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def broken(attention: ModuleType) -> bool:
    """Does an attention layer put packed weights into a plain one?"""
    return any(fuses_packed(owner) for owner in attention_layers(attention))


def patch(attention: ModuleType, draft: Draft) -> None:
    def make_for_layer(original):
        def fuse_projections(self, *args, **kwargs):
            refuse([self], self)
            return original(self, *args, **kwargs)

        return fuse_projections

    def make_for_model(original):
        def fuse_qkv_projections(self, *args, **kwargs):
            # Some attention classes have their own fuse_projections.
            refuse([one for one in self.modules() if isinstance(one, attention.AttentionModuleMixin)], self)
            return original(self, *args, **kwargs)

        return fuse_qkv_projections

    for owner in attention_layers(attention):
        if fuses_packed(owner):
            draft.wrap_plain(owner, "fuse_projections", make_for_layer)
            # Models with the older Attention have their own method for it, each in its file.
            if owner is not attention.Attention:
                draft.wrap_plain(resolve(attention, "AttentionMixin"), "fuse_qkv_projections", make_for_model)


def attention_layers(attention: ModuleType) -> list[Any]:
    """The classes of attention layers that can be fused: from 0.35 on there are two."""
    newer = [attention.AttentionModuleMixin] if hasattr(attention, "AttentionModuleMixin") else []
    return [resolve(attention, "Attention"), *newer]


def fuses_packed(owner: Any) -> bool:
    """Fuse a stand-in for a layer of ``owner`` whose weights are 8-bit integers on meta."""
    import torch

    linear = SimpleNamespace(weight=torch.empty(1, 1, dtype=torch.int8, device="meta"), bias=None)
    layer = SimpleNamespace(
        **dict.fromkeys(_PROJECTIONS[:3], linear),
        is_cross_attention=False,
        use_bias=False,
        _supports_qkv_fusion=True,
    )
    try:
        resolve(owner, "fuse_projections")(layer)
    except RuntimeError:
        return True
    except ValueError:
        return False
    return False


def refuse(layers: list[Any], whole: Any) -> None:
    count = sum(
        is_packed(getattr(layer, name, None))
        for layer in layers
        if getattr(layer, "_supports_qkv_fusion", True)
        for name in _PROJECTIONS
    )
    if count:
        raise ValueError(
            f"projections with packed or 8-bit weights cannot be fused ({count} of this {type(whole).__name__}); the "
            "output is the same without fuse_qkv_projections(), so leave the call out. To run with fused projections, "
            "load the model without quantization, fuse it, and then quantize it"
        )


def is_packed(layer: Any) -> bool:
    """Whether a projection's weight is stored in a form that a plain layer cannot read."""
    weight = getattr(layer, "weight", None)
    if weight is None:
        return False
    # 4-bit weights may be packed in a floating dtype; torchao's report the dtype of the weights they represent. A plain
    # layer cannot be made from float8 weights (layerwise casting, and Black Forest Labs's, which also have scales).
    return (
        not weight.dtype.is_floating_point
        or weight.dtype.itemsize == 1
        or hasattr(weight, "quant_state")
        or type(weight).__module__.partition(".")[0] == "torchao"
    )
