"""Attend-and-Excite keeps the graph of its last backward pass on the device.

Symptom: after a run of ``StableDiffusionAttendAndExcitePipeline`` hundreds of MB stay on the device until the next
    run, under model, sequential and group offload as well: activations of the UNet, and its offloaded weights.
Cause: ``pipe.attention_store`` keeps the attention maps of the last pass with gradients, and with them its graph.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/deprecated/stable_diffusion_attend_and_excite/pipeline_stable_diffusion_attend_and_excite.py#L114;
    not reported.
Patch: once the loss is computed from them, the store keeps the maps without their graph.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-attend-excite-graph",
    targets=(
        Target(
            "diffusers-attend-excite-store",
            "diffusers.pipelines.deprecated.stable_diffusion_attend_and_excite."
            "pipeline_stable_diffusion_attend_and_excite",
            {"diffusers": ">=0.38.0,<=0.42.1"},
        ),
        Target(
            "diffusers-attend-excite-store-old",
            "diffusers.pipelines.stable_diffusion_attend_and_excite.pipeline_stable_diffusion_attend_and_excite",
            {"diffusers": ">=0.31.0,<0.38.0"},
        ),
    ),
    harm="memory or time",
    frames=("AttendAndExcite|attend_and_excite", "attention_store"),
    hot=True,
    since="0.1.0",
)


def broken(module: ModuleType) -> bool:
    """Does the store still have a map with a graph once the maps were added up?"""
    import torch

    store = resolve(module, "AttentionStore")((1, 1))
    with torch.inference_mode(False), torch.enable_grad():
        attention = torch.ones(1, 1, 1, device="cpu", requires_grad=True) * 1
        store.attention_store = {"up": [attention]}
        store.aggregate_attention(["up"])
    return bool(store.attention_store["up"][0].requires_grad)


def patch(module: ModuleType, draft: Draft) -> None:
    def make(original):
        def aggregate_attention(self, from_where):
            total = original(self, from_where)
            self.attention_store = {
                place: [attention.detach() for attention in maps]
                for place, maps in self.attention_store.items()
            }
            return total

        return aggregate_attention

    draft.wrap_plain(resolve(module, "AttentionStore"), "aggregate_attention", make)
