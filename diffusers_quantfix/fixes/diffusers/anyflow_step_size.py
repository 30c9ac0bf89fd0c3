"""AnyFlow ignores its step size with quantized layers, or cannot run.

Symptom: NotImplementedError "silu_cpu" not implemented for 'Byte' in 4-bit. No error in 8-bit, but the output does not
    depend on ``r_timestep``.
Cause: ``forward_timestep`` casts to the dtype of ``delta_embedder``'s first weight: in 4-bit the step embedding, which
    is destroyed; in 8-bit the gate, so 0.25 becomes 0.
Upstream: not reported.
Patch: if that weight is packed, ``forward_timestep`` sees one with the dtype of the biases instead.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...models.any_flow import destroys_step_size, keeping_step_size

_CLASSES = {
    "transformer_anyflow": "AnyFlowDualTimestepTextImageEmbedding",
    "transformer_anyflow_far": "AnyFlowDualTimestepTextImageEmbeddingCausal",
}

FIX = Fix(
    __doc__,
    id="diffusers-anyflow-step-size",
    targets=(
        Target(
            "diffusers-anyflow-embedder-dtype",
            "diffusers.models.transformers.transformer_anyflow",
            {"diffusers": ">=0.39.0,<=0.42.1"},
        ),
        Target(
            "diffusers-anyflow-far-embedder-dtype",
            "diffusers.models.transformers.transformer_anyflow_far",
            {"diffusers": ">=0.39.0,<=0.42.1"},
        ),
    ),
    harm="wrong result",
    patterns=(r"silu_\w+'? not implemented for '(Byte|Char)'",),
    frames=("AnyFlow", r"transformer_anyflow(_far)?\.py"),
    hot=True,
)


def broken(module: ModuleType) -> bool:
    return destroys_step_size(_embedding(module))


def patch(module: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(_embedding(module), "forward_timestep", keeping_step_size)


def _embedding(module: ModuleType) -> type:
    cls: type = resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
    return cls
