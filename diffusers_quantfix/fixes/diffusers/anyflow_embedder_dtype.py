"""AnyFlow ignores its step size with quantized layers, or cannot run.

Symptom: NotImplementedError "silu_cpu" not implemented for 'Byte' in 4 bits. No error in 8 bits, but the output does
    not depend on ``r_timestep``.
Cause: ``forward_timestep`` casts to the dtype of the first weight of ``delta_embedder``: in 4 bits the embedding of the
    step, of which nothing is left; in 8 bits the gate, so that 0.25 becomes 0.
Upstream: not reported.
Patch: where that weight is packed, ``forward_timestep`` sees one of the dtype of the biases instead. Twin:
    ``diffusers-anyflow-far-embedder-dtype``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.any_flow import destroys_step_size, keeping_step_size

FIX = Fix(
    id="diffusers-anyflow-embedder-dtype",
    title="AnyFlow ignores its step size with quantized layers, or cannot run",
    module="diffusers.models.transformers.transformer_anyflow",
    claims={"diffusers": ">=0.39.0,<=0.42.1"},
    upstream=(),
    symptom="NotImplementedError: \"silu_cpu\" not implemented for 'Byte' in AnyFlow; in 8 bits its output does "
    "not depend on r_timestep",
    harm="wrong result",
    since="0.1.0",
    patterns=(r"silu_\w+'? not implemented for '(Byte|Char)'",),
    frames=(r"AnyFlow(?![ _]?FAR)", r"transformer_anyflow\.py"),
    hot=True,
)

_CLASS = "AnyFlowDualTimestepTextImageEmbedding"


def broken(transformer_anyflow: ModuleType) -> bool:
    return destroys_step_size(resolve(transformer_anyflow, _CLASS))


def patch(transformer_anyflow: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(resolve(transformer_anyflow, _CLASS), "forward_timestep", keeping_step_size)
