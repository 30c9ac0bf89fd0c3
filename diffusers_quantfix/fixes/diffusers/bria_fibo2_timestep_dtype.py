"""Bria Fibo 2 cannot run in 8-bit.

Symptom: RuntimeError "Expected query, key, and value to have the same dtype" from ``BriaFibo2AttnProcessor``.
Cause: ``TimestepEmbedder.forward`` casts the step embedding to the dtype of a plain weight or to the ``compute_dtype``
    of a 4-bit layer. An 8-bit layer has neither: the embedding and everything after it stay in float32.
Upstream: not reported.
Patch: if the weight is packed and the layer has no ``compute_dtype``, ``forward`` sees a weight with the dtype of the
    layer's bias instead.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import LayerCalled, packed_stand_in, with_floating_weights

FIX = Fix(
    __doc__,
    id="diffusers-bria-fibo2-timestep-dtype",
    module="diffusers.models.transformers.transformer_bria_fibo2",
    claims={"diffusers": ">=0.42.0,<=0.42.1"},
    since="0.1.0",
    patterns=(r"Expected query, key, and value to have the same dtype",),
    frames=("transformer_bria_fibo2.py", "BriaFibo2"),
    hot=True,
)


def broken(transformer_bria_fibo2: ModuleType) -> bool:
    """Which dtype does an 8-bit layer with a bfloat16 bias get?

    On meta: the first sine on the CPU would make MKL read the program's settings for good.
    """
    import torch

    embedder = resolve(transformer_bria_fibo2, "TimestepEmbedder")(1)
    # On meta torch computes the shape of each sine in Python.
    embedder.timestep_embedding = lambda steps, *_: steps
    embedder.mlp[0] = packed_stand_in(1).to(torch.bfloat16)
    try:
        embedder(torch.empty(1, device="meta"))
    except LayerCalled as called:
        return bool(called.dtype != torch.bfloat16)
    return False


def patch(transformer_bria_fibo2: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, *args, **kwargs):
            cast_already = getattr(self.mlp[0], "compute_dtype", None) is not None
            seen = self if cast_already else with_floating_weights(self, "mlp")
            return original(seen, *args, **kwargs)

        return forward

    draft.wrap_plain(resolve(transformer_bria_fibo2, "TimestepEmbedder"), "forward", make)
