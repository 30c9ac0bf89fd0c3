"""AudioLDM 2 and MusicLDM leave a model on the device under model offload.

Symptom: after ``enable_model_cpu_offload()`` and a run of AudioLDM 2 or MusicLDM their vocoder stays on the device,
    also after ``maybe_free_model_hooks()``; after an interrupted run the UNet stays there, too. Each further call of
    ``enable_model_cpu_offload()`` adds a second set of hooks, and no call is refused under group offload.
Cause: these two have an ``enable_model_cpu_offload`` of their own, which sets neither ``_all_hooks`` nor
    ``_offload_device``, and does not remove earlier hooks. ``maybe_free_model_hooks`` does nothing without them.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/audioldm2/pipeline_audioldm2.py#L225;
    not reported.
Patch: it refuses what ``DiffusionPipeline``'s method refuses, removes earlier hooks, and sets both.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import names_used, resolve
from ...loading.device import current_accelerator

FIX = Fix(
    __doc__,
    id="diffusers-own-model-offload",
    targets=(
        Target(
            "diffusers-audioldm2-model-offload",
            "diffusers.pipelines.audioldm2.pipeline_audioldm2",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
        Target(
            "diffusers-musicldm-model-offload",
            "diffusers.pipelines.deprecated.musicldm.pipeline_musicldm",
            {"diffusers": ">=0.38.0,<=0.42.1"},
        ),
        Target(
            "diffusers-musicldm-model-offload-old",
            "diffusers.pipelines.musicldm.pipeline_musicldm",
            {"diffusers": ">=0.31.0,<0.38.0"},
        ),
    ),
    harm="memory or time",
    frames=("AudioLDM2|audioldm2", "MusicLDM|musicldm", "enable_model_cpu_offload", "maybe_free_model_hooks"),
    since="0.1.0",
    asked_once=True,
)

_CLASSES = {"pipeline_audioldm2": "AudioLDM2Pipeline", "pipeline_musicldm": "MusicLDMPipeline"}
_OWN = "enable_model_cpu_offload"


def broken(module: ModuleType) -> bool:
    """Does the class have a method of its own that leaves the hooks to nobody?"""
    own = vars(_class(module)).get(_OWN)
    return own is not None and "_all_hooks" not in names_used(own)


def patch(module: ModuleType, draft: Draft) -> None:
    cls = _class(module)

    def make(original):
        takes_device = "device" in inspect.signature(original).parameters

        def enable_model_cpu_offload(self, gpu_id=None, device=None):
            _refuse(self)
            place = _place(self, gpu_id, device)
            self.remove_all_hooks()
            self._offload_gpu_id, self._offload_device = place.index, place
            if takes_device:
                original(self, device=place)
            else:
                original(self, gpu_id=place.index)
            self._all_hooks = [*_chain(self.final_offload_hook)]

        return enable_model_cpu_offload

    draft.wrap_plain(cls, _OWN, make)


def _class(module: ModuleType) -> Any:
    return resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])


def _refuse(pipe: Any) -> None:
    """Raise what ``DiffusionPipeline.enable_model_cpu_offload`` raises, as far as this release has it."""
    for name in (
        "_maybe_raise_error_if_group_offload_active",
        "_maybe_raise_error_if_tensor_parallel_active",
    ):
        check = getattr(pipe, name, None)
        if check is not None:
            check(**({"raise_error": True} if "raise_error" in inspect.signature(check).parameters else {}))
    mapped = getattr(pipe, "_is_pipeline_device_mapped", None)
    if mapped() if mapped is not None else len(getattr(pipe, "hf_device_map", None) or ()) > 1:
        raise ValueError(
            "a pipeline with a `device_map` cannot be offloaded as well; call `reset_device_map()` first, "
            "then `enable_model_cpu_offload()`"
        )


def _place(pipe: Any, gpu_id: int | None, device: Any) -> Any:
    """The device, with its index: what was passed, or what an earlier call was passed, or 0."""
    torch = sys.modules["torch"]
    place = torch.device(current_accelerator().type if device is None else device)
    if gpu_id is not None and place.index is not None:
        raise ValueError(
            f"`gpu_id`={gpu_id} and the index of `device`={place} say the same thing: pass one of them"
        )
    return torch.device(place.type, gpu_id or place.index or getattr(pipe, "_offload_gpu_id", 0))


def _chain(hook: Any) -> Iterator[Any]:
    """A hook and those before it: each offloads the model before its own."""
    while hook is not None:
        yield hook
        hook = hook.hook.prev_module_hook
