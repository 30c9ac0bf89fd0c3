"""Stable Cascade's prior cannot run quantized.

Symptom: RuntimeError or NotImplementedError "normal_kernel_cpu" not implemented for 'Byte' (8-bit: 'Char') from
    `StableCascadePriorPipeline`.
Cause: the pipeline makes its noise in the dtype of the prior's first weight, ``next(self.prior.parameters()).dtype``,
    which is the type of the packed bytes.
Upstream: not reported.
Patch: ``StableCascadePriorPipeline.__call__`` uses the dtype of the first floating weight. ``self.prior.dtype``, as
    used by the decoder's pipeline, is also the type of the packed bytes in diffusers 0.31.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="diffusers-cascade-prior-dtype",
    module="diffusers.pipelines.stable_cascade.pipeline_stable_cascade_prior",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    since="0.1.0",
    patterns=(r"normal_kernel_\w+.{0,5} not implemented for .(Byte|Char)",),
    frames=(
        "diffusers/pipelines/stable_cascade/pipeline_stable_cascade_prior.py:prepare_latents",
        "StableCascade",
    ),
)


_FLOATING = "next(weight.dtype for weight in self.prior.parameters() if weight.is_floating_point())"


class _Asked(Exception):
    """The pipeline has read a dtype."""


class _Weight:
    """A weight that records whether the pipeline read the dtype of a floating weight."""

    def __init__(self, seen: list[bool], floating: bool) -> None:
        self._seen, self._floating = seen, floating

    def is_floating_point(self) -> bool:
        return self._floating

    @property
    def dtype(self) -> Any:
        self._seen.append(self._floating)
        raise _Asked


class _Pipeline:
    """The probe's stand-in for a pipeline, and for its prior."""

    _execution_device = "cpu"

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.prior = self

    def parameters(self) -> Any:
        return iter((_Weight(self.seen, False), _Weight(self.seen, True)))


def broken(module: ModuleType) -> bool:
    """Does a call use the dtype of a packed weight?"""
    pipeline = _Pipeline()
    with contextlib.suppress(_Asked, AttributeError):
        function_of(resolve(module, "StableCascadePriorPipeline.__call__"))(pipeline, prompt="")
    return pipeline.seen == [False]


def patch(module: ModuleType, draft: Draft) -> None:
    """Replace the code of ``StableCascadePriorPipeline.__call__``."""
    function = own_function(module, "StableCascadePriorPipeline.__call__")
    draft.replace(function, "__code__", exchanged(function, "next(self.prior.parameters()).dtype", _FLOATING))
