"""Loading a LoRA switches the whole pipeline to sequential CPU offload.

Symptom: every run is slow after ``load_lora_weights()``: the pipeline is under ``enable_sequential_cpu_offload``. That
    was never requested. Or the next run raises, since the components cannot be offloaded this way, or ``fuse_lora()``:
    "'NoneType' object has no attribute 'to'" in ``dequantize_bnb_weight``, from 8-bit weights.
Cause: ``_func_optionally_disable_offloading`` treats every root hook of class ``AlignDevicesHook`` as sequential
    offload, even one that only aligns inputs. ``accelerate.dispatch_model`` puts such a hook on a model that is spread
    over several GPUs, and in older releases on every 8-bit model. The removed hooks are not restored: the whole
    pipeline is offloaded again, regardless of which components were offloaded and how; after an error nothing is
    offloaded.
Upstream: https://github.com/huggingface/diffusers/issues/10914, https://github.com/huggingface/diffusers/issues/7539,
    https://github.com/huggingface/diffusers/issues/11648, https://github.com/huggingface/diffusers/pull/8750,
    https://github.com/huggingface/diffusers/pull/14271; open.
Patch: while a LoRA is loaded into a pipeline, the offloading hooks of the models that can have a LoRA are removed, and
    then the same hooks are restored, also on new layers. The other models are not touched, and upstream's function
    finds no hooks. When it is called directly, it ignores hooks that do not offload.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.hooks import accelerate_hooks, is_sequentially_offloaded
from ...offloading.suspended import hidden_hooks, hooks_aside

FIX = Fix(
    __doc__,
    id="diffusers-lora-offload-flip",
    module="diffusers.loaders.lora_pipeline",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": "", "peft": ""},
    harm="memory or time",
    patterns=(
        "enable_sequential_cpu_offload requires accelerator, but not found",
        "sequentially offloaded now",
        r"is_sequential_cpu_offload.{1,20}\bTrue\b",
        "moved to (the )?CPU after loading (a |the )?LoRA",
        # fuse_lora() of an 8-bit pipeline that was not offloaded before its LoRA was loaded
        r"dequantize_bnb_weight.{0,400}'NoneType' object has no attribute 'to'",
    ),
    frames=("load_lora_weights", "load_lora_adapter", "loaders/peft.py", "lora_base.py"),
)


def broken(lora_pipeline: ModuleType) -> bool:
    """Call upstream's function with a pipeline whose only component has a hook that aligns inputs."""
    import torch
    from accelerate.hooks import AlignDevicesHook

    owner, name = _detection()
    component = torch.nn.Identity()
    component._hf_hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    return bool(getattr(owner, name)(Pipeline({"transformer": component}))[1])


class Pipeline:
    """A stand-in for a pipeline, with what upstream's function reads."""

    def __init__(self, components: Any, hf_device_map: Any = None) -> None:
        self.components = components
        self.hf_device_map = hf_device_map


def patch(lora_pipeline: ModuleType, draft: Draft) -> None:
    def make_detection(original):
        def disable_offloading(*args, **kwargs):
            if kwargs.keys() - {"_pipeline"}:  # upstream's own error
                return original(*args, **kwargs)
            *first, pipeline = (*args, *kwargs.values())
            if pipeline is not None:
                offloading = {
                    name: part for name, part in pipeline.components.items() if not only_aligns(part)
                }
                pipeline = Pipeline(offloading, pipeline.hf_device_map)
            return original(*first, pipeline)

        return disable_offloading

    def make_load(original):
        def load_lora_weights(self, *args, **kwargs):
            components = getattr(self, "components", None)
            if not isinstance(components, dict):
                return original(self, *args, **kwargs)
            changing = [components.get(name) for name in self._lora_loadable_modules]
            with hooks_aside(*changing), hidden_hooks(components.values()):
                return original(self, *args, **kwargs)

        return load_lora_weights

    mixins = {
        value
        for value in vars(lora_pipeline).values()
        if isinstance(value, type)
        and value.__module__ == lora_pipeline.__name__
        and "load_lora_weights" in vars(value)
    }
    if not mixins:
        raise TargetMissing(f"{lora_pipeline.__name__} loads no LoRA")
    owner, name = _detection()
    draft.wrap_plain(owner, name, make_detection)
    for mixin in sorted(mixins, key=lambda mixin: mixin.__name__):
        draft.wrap_plain(mixin, "load_lora_weights", make_load)


def only_aligns(component: Any) -> bool:
    """Whether a component, which may be any object, has its own hook, and that hook does not move its weights."""
    from accelerate.hooks import AlignDevicesHook

    first = next(accelerate_hooks(component), None)
    return isinstance(first, AlignDevicesHook) and not is_sequentially_offloaded(component)


def _detection() -> tuple[Any, str]:
    """The owner of upstream's function: the module from 0.33.0 on, before that the mixin."""
    from diffusers.loaders import lora_base

    name = "_func_optionally_disable_offloading"
    if hasattr(lora_base, name):
        return lora_base, name
    name = "_optionally_disable_offloading"
    mixin = resolve(lora_base, "LoraBaseMixin")
    resolve(mixin, name)
    return mixin, name
