"""Weights that are used without a call stay offloaded: LoKr, LoHa, DoRA, some embeddings, ACE-Step.

Symptom: RuntimeError "Tensor on device meta is not on the expected device cuda:0!" from a LoKr or LoHa, or from
    SigLIP 2 (Z-Image-Omni), and "X1 and X2 must have the same device type. X1: cuda X2: meta" from a VQModel (latent
    diffusion, super resolution), under ``enable_sequential_cpu_offload()``. NotImplementedError "Cannot copy out of
    meta tensor; no data!" from any DoRA, and from ``prepare_src_latents`` of ACE-Step. With the CPU as the execution
    device a LoKr or LoHa raises no error: torch reads uninitialized memory, and each run gives a different image, or a
    black one.
Cause: ``attach_align_device_hook`` gives every module with parameters of its own a hook that brings them when the
    module is called. A ``ParameterDict`` or ``ParameterList`` is never called, and ``VectorQuantizer`` and
    ``Siglip2VisionEmbeddings`` read the weight of an embedding without calling it. A DoRA's layer is called with the
    layer below it, whose weight it reads; its hook moves that layer like a tensor. ACE-Step's pipeline reads
    ``silence_latent`` and ``null_condition_emb`` of its condition encoder between two calls.
Upstream: https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py#L491; not reported.
Patch: their parent gets a hook that calls theirs; that of a DoRA's layer brings what it is called with. The two tensors
    of ACE-Step stay on the CPU.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.containers import hook_containers, hook_passed_layers, keep_readable

FIX = Fix(
    __doc__,
    id="accelerate-parameter-containers",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0"},
    harm="wrong result",
    patterns=(
        r"tuners/lo(kr|ha)/layer.{0,4000}Tensor on device meta is not on the expected device",
        r"modeling_siglip2.{0,4000}Tensor on device meta is not on the expected device",
        "X1 and X2 must have the same device type. X1: cuda X2: meta",
        r"tuners/lora.{0,4000}accelerate/hooks\.py.{0,4000}Cannot copy out of meta tensor",
        r"pipeline_ace_step.{0,4000}Cannot copy out of meta tensor",
    ),
    frames=(
        "tuners/lo(kr|ha|ra)",
        "lo(kr|ha)|dora",
        "vq_model|siglip2",
        "pipeline_ace_step.py:prepare_src_latents|silence_latent|null_condition_emb",
        "accelerate/hooks.py:new_forward",
    ),
    since="0.1.0",
)


def broken(hooks: ModuleType) -> bool:
    """Offload modules that have nothing but such a container or embedding; do they have a hook?"""
    import torch

    module = torch.nn.Module()
    module.factors = torch.nn.ParameterDict({"one": torch.nn.Parameter(torch.zeros(1))})
    reader = type("VectorQuantizer", (torch.nn.Module,), {})()
    reader.embedding = torch.nn.Embedding(1, 1)
    attach = resolve(hooks, "attach_align_device_hook")
    for one in (module, reader):
        attach(one, torch.device("cpu"), offload=True, weights_map=one.state_dict())
    return not hasattr(module, "_hf_hook") or not hasattr(reader, "_hf_hook")


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make(original):
        def attach_align_device_hook(module, *args, **kwargs):
            attached = original(module, *args, **kwargs)  # calls this function for all children
            hook_containers(module)
            hook_passed_layers(module)
            keep_readable(module)
            return attached

        return attach_align_device_hook

    draft.wrap_plain(hooks, "attach_align_device_hook", make)
