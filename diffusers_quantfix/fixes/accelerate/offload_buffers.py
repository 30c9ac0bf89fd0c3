"""Sequential offload leaves the buffers of quantized layers on the GPU.

Symptom: after ``enable_sequential_cpu_offload()`` all buffers of a model stay on the GPU: the weights themselves in
    GPTQ and AutoRound layers, the scales in those of Black Forest Labs.
Cause: diffusers calls ``accelerate.cpu_offload`` with ``offload_buffers=False`` for every model without a parameter at
    its root, and ``AlignDevicesHook.init_hook`` then puts all buffers on the execution device permanently.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/pipeline_utils.py#L1358; not
    reported.
Patch: a linear layer's hook offloads its buffers too, unless they are all scalars. Buffers of other modules stay where
    they are: pipelines read some of them directly (``vae.bn.running_mean`` in Flux 2).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="accelerate-offload-buffers",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0"},
    # Anchored at the start: trying a match at every word of a long log takes quadratic time.
    patterns=(r"\A(?=.*sequential)(?=.*(gptq|auto.?round)).*out of memory",),
    frames=("enable_sequential_cpu_offload", "gptq|auto.?round|nvfp4|fp8r"),
    harm="memory or time",
)


def broken(hooks: ModuleType) -> bool:
    """Offload a linear layer with a buffer; is the buffer still there?"""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False)
    layer.register_buffer("scale", torch.ones(2))
    # "cpu" as a string: accelerate empties the caches of all devices after a move to anything else.
    hook = resolve(hooks, "AlignDevicesHook")(execution_device="cpu", offload=True, offload_buffers=False)
    hook.init_hook(layer)
    return not layer.scale.is_meta


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make(original):
        def init_hook(self, module):
            if self.offload and not self.offload_buffers and has_buffers_to_offload(module, self.weights_map):
                self.offload_buffers = True
            return original(self, module)

        return init_hook

    draft.wrap_plain(resolve(hooks, "AlignDevicesHook"), "init_hook", make)


def has_buffers_to_offload(module: Any, weights: Any) -> bool:
    """Whether it is a linear layer with a non-scalar buffer, and ``weights`` (None: not made yet) has all its buffers.

    A weights map passed by the caller need not have the buffers.
    """
    if not (hasattr(module, "in_features") or hasattr(module, "infeatures")):
        return False
    buffers = {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    if all(buffer.ndim == 0 for buffer in buffers.values()):
        return False
    return weights is None or all(name in weights for name in buffers)
