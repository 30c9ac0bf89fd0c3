"""A model that was loaded onto one GPU by a device_map cannot be moved.

Symptom: ValueError "It seems like you have activated sequential model offloading" from ``pipe.to("cuda")``, though
    nothing was offloaded, or RuntimeError "Expected all tensors to be on the same device" after
    ``transformer.to("cuda:1")``, when the transformer was loaded with ``device_map="auto"`` on one GPU.
Cause: ``ModelMixin.from_pretrained`` has ``load_checkpoint_and_dispatch`` put hooks on every module, also on one device
    (``force_hooks=True``). They look like those of offload to ``DiffusionPipeline.to``, and nothing updates them.
Upstream: https://github.com/huggingface/diffusers/pull/10390, in 0.33.0, puts no hooks on such a model.
Patch: after a move of such a model, its hooks send the inputs to the new device, and it does not count as offloaded.
    They are not removed, since programs written for these releases give inputs on the CPU.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...models.following import follow
from ...offloading.hooks import is_spread

FIX = Fix(
    __doc__,
    id="diffusers-device-map-hooks",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.31.0,<0.33", "accelerate": ""},
    patterns=(
        "you have activated sequential model offloading by calling",
        "Expected all tensors to be on the same device",
    ),
    frames=("diffusers/pipelines/pipeline_utils.py:to", r"from_pretrained\([^)]{0,99}device_map"),
    fixed_in="diffusers 0.33.0",
    asked_once=True,
    since="0.1.0",
)


def broken(modeling_utils: ModuleType) -> bool:
    """Does ``from_pretrained`` ask for hooks on one device, too? Only loading a model would show it otherwise."""
    code = function_of(resolve(modeling_utils, "ModelMixin.from_pretrained")).__code__
    return any(isinstance(names, tuple) and "force_hooks" in names for names in code.co_consts)


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def from_pretrained(cls, *args, **kwargs):
            loaded = original(cls, *args, **kwargs)
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            follow(model, is_on_one_device)
            return loaded

        return from_pretrained

    def is_on_one_device(model):
        return not is_spread(model)

    draft.wrap_plain(resolve(modeling_utils, "ModelMixin"), "from_pretrained", make)
