"""Group offload separates a prior's latents from its statistics.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    from ``post_process_latents`` after group offload of the prior of Kandinsky, Kandinsky 2.2, UnCLIP or Stable UnCLIP.
Cause: ``clip_mean`` and ``clip_std`` are parameters of the whole model, onloaded while its ``forward`` runs.
    ``post_process_latents`` is called after the last pass.
Upstream: https://github.com/huggingface/diffusers/pull/14695, in 0.41.0.
Patch: ``post_process_latents`` uses them on the device of the latents, as 0.41.0 does.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import InPlaceOf

FIX = Fix(
    __doc__,
    id="diffusers-prior-group-offload",
    module="diffusers.models.transformers.prior_transformer",
    claims={"diffusers": ">=0.33.0,<0.41.0"},
    patterns=(r"prior_transformer.{0,4000}Expected all tensors to be on the same device",),
    frames=("prior_transformer.py:post_process_latents", "clip_std|clip_mean"),
    fixed_in="diffusers 0.41.0",
    since="0.1.0",
)

_STATISTICS = ("clip_mean", "clip_std")


def broken(prior_transformer: ModuleType) -> bool:
    """Does it fail for latents on another device than the statistics?"""
    import torch

    resolve(prior_transformer, "PriorTransformer.enable_group_offload")  # before 0.33 there is none to cure
    process = resolve(prior_transformer, "PriorTransformer.post_process_latents")
    model = SimpleNamespace(**{name: torch.zeros(1, 2) for name in _STATISTICS})
    try:
        process(model, torch.zeros(1, 2, device="meta"))
    except RuntimeError:
        return True
    return False


def patch(prior_transformer: ModuleType, draft: Draft) -> None:
    def make(original):
        def post_process_latents(self, prior_latents):
            statistics = {name: getattr(self, name) for name in _STATISTICS}
            device = prior_latents.device
            if all(one.device == device for one in statistics.values()):
                return original(self, prior_latents)
            moved = {name: one.to(device) for name, one in statistics.items()}
            return original(InPlaceOf(self, moved), prior_latents)

        return post_process_latents

    draft.wrap_plain(resolve(prior_transformer, "PriorTransformer"), "post_process_latents", make)
