"""A modular pipeline that ran once encodes no negative prompt the next time.

Symptom: TypeError "type_as(): argument 'other' (position 1) must be Tensor, not NoneType", KeyError 'prompt_embeds', or
    another error about a missing negative prompt, in the second call of a pipeline whose guidance ends before the run
    (``stop``), and of every distilled Helios; quantized or not.
Cause: before a run, text encoders ask ``guider.num_conditions`` whether a negative prompt is needed. The answer is for
    the last step of the run before: there guidance was off, so none is encoded, and the first step has none.
Upstream: not reported;
    https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/guiders/guider_utils.py#L176.
Patch: a guider forgets its step when the step's predictions are combined, as a new one has none. ``set_state`` says the
    next one. A run that ends with an error within a step is as without the fix.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-guider-step",
    module="diffusers.guiders.guider_utils",
    claims={"diffusers": ">=0.35.0,<=0.42.1"},
    harm="error",
    patterns=(r"transformer_helios.{0,2000}type_as\(\): argument 'other' .{0,30}not NoneType",),
    frames=("modular_pipelines", "guider", "negative_prompt|NoneType"),
    since="0.1.0",
)


def broken(guider_utils: ModuleType) -> bool:
    """Combine the predictions of a step of a guider that has none, and look whether the step is still there."""
    guidance = resolve(guider_utils, "BaseGuidance")

    class Guider(guidance):  # type: ignore[misc, valid-type]
        num_conditions = 0

        def __init__(self) -> None: ...

        def forward(self) -> None: ...

    guider = Guider()
    resolve(guidance, "set_state")(guider, 1, 2, 3)
    guider([])
    return (guider._step, guider._num_inference_steps) == (1, 2)


def patch(guider_utils: ModuleType, draft: Draft) -> None:
    def make(upstream: Any) -> Any:
        def __call__(self, *args, **kwargs):
            try:
                return upstream(self, *args, **kwargs)
            finally:
                self._step = self._num_inference_steps = self._timestep = None

        return __call__

    draft.wrap_plain(resolve(guider_utils, "BaseGuidance"), "__call__", make)
