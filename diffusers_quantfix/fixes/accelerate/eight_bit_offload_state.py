"""Sequential offload keeps every 8-bit weight on the GPU after its first use.

Symptom: after one run of an 8-bit model under ``enable_sequential_cpu_offload`` or ``accelerate.cpu_offload``, 91 % of
    it stays on the GPU, and peak memory is the whole model. If its hooks are then removed, the model raises
    "unsupported operand type(s) for *: 'NoneType'" or "'NoneType' object has no attribute", and so does a backward
    pass. Before bitsandbytes 0.45, a model that ran before it was offloaded stays on the GPU until its next run, and
    one whose hooks are removed produces noise without an error.
Cause: bitsandbytes moves the weight of an 8-bit layer into ``layer.state`` in its first forward pass: to CB, and before
    0.45.0, in tiles, to CxB. After the pass ``AlignDevicesHook.post_forward`` clears ``state.CxB`` only. When a model
    is offloaded after it has run, ``init_hook`` ignores the state. Before accelerate 1.14, ``detach_hook`` restores the
    weight without its scales (SCB); old bitsandbytes treats it as not yet quantized.
Upstream: https://github.com/huggingface/accelerate/pull/3907 and https://github.com/huggingface/accelerate/pull/4044
    handle SCB only; open.
Patch: the three hook methods. When a weight has been put on meta, its tensors are removed from the state. When a weight
    is restored permanently, it gets its scales from the weights map; a map that the hook creates itself contains them,
    and rows instead of tiles. A backward pass keeps the state with the weight until it has run.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.versions import contains, installed_version
from ...offloading.uncompiled import uncompiled_later
from ...weights.int8_params import in_tiles, rows_of

FIX = Fix(
    __doc__,
    id="accelerate-8bit-offload-state",
    module="accelerate.hooks",
    claims={"accelerate": ">=0.34.2,<=1.15.0", "bitsandbytes": ">=0.43.0"},
    harm="memory or time",
    patterns=(
        "'NoneType' object has no attribute 'unsqueeze'",
        r"dequantize_bnb_weight.{0,400}'NoneType' object has no attribute 'to'",
    ),
    frames=("remove_all_hooks", "8.?bit|int8", "enable_sequential_cpu_offload", "bitsandbytes/"),
    hot=True,
)

# The tensors in a layer's state that belong to the weight or to the last activations (subB, idx).
_OF_THE_WEIGHT = {"CB", "CxB", "SB", "SCB", "CBt", "CxBt", "SBt", "SCBt", "subB", "idx", "_tile_indices"}


def broken(hooks: ModuleType) -> bool:
    """Let the hook offload a one-weight layer that has run; does its state keep the weight?"""
    import torch

    class Linear8bitLt(torch.nn.Module):
        in_features = out_features = 1

    layer = Linear8bitLt()
    layer.weight = torch.nn.Parameter(torch.zeros(1, 1), requires_grad=False)
    layer.state = State()
    layer.state.SCB = torch.zeros(1)
    hook = resolve(hooks, "AlignDevicesHook")(execution_device="cpu", offload=True, weights_map={})
    if contains("<0.45.0", installed_version("bitsandbytes") or "0.45.0"):
        # Such a layer has its weight in CxB, which the end of a forward pass handles, and the offloading does not.
        layer.state.CxB = layer.weight.data
        hook.init_hook(layer)
        return layer.state.CxB is not None
    layer.state.CB = layer.weight.data
    hook.tied_pointers_to_remove = set()
    with _without_the_compiler(type(hook).post_forward):
        hook.post_forward(layer, None)
    return layer.state.CB is not None


@contextlib.contextmanager
def _without_the_compiler(method: Any) -> Iterator[None]:
    """Let the probe call a method that accelerate 1.15 passes to ``torch.compiler.disable`` on its first call: that
    imports torch._dynamo, which takes seconds, and the program may never need it."""
    lazy = []
    while method is not None:
        names = getattr(getattr(method, "__code__", None), "co_names", ())
        if "_compiled_fn" in names and hasattr(method, "__wrapped__") and not hasattr(method, "_compiled_fn"):
            lazy.append(method)
        method = getattr(method, "__wrapped__", None)
    for function in lazy:
        function._compiled_fn = function.__wrapped__
    try:
        yield
    finally:
        for function in lazy:
            del function._compiled_fn


class State:
    """The probe's stand-in for a ``MatmulLtState``."""

    CB = CxB = SCB = None


def patch(hooks: ModuleType, draft: Draft) -> None:
    torch = sys.modules["torch"]
    hook_class = resolve(hooks, "AlignDevicesHook")

    def make_init(original):
        def init_hook(self, module):
            if not self.offload:
                return original(self, module)
            missing = {}
            if self.weights_map is None:
                # The hook builds one from the parameters alone, as they are.
                for name, layer in layers_below(self, module):
                    if (scales := scales_of(layer)) is not None:
                        missing[f"{name}SCB"] = scales.to("cpu")
                    if in_tiles(layer):
                        missing[f"{name}weight"] = rows_of(layer).to("cpu")
            result = original(self, module)
            if missing:
                self.weights_map.update(missing)
            give_up(self, module)
            return result

        return init_hook

    def make_post(original):
        @uncompiled_later
        def offload(self, module, output):
            if torch.is_grad_enabled():
                # A backward pass reads the state: it keeps the copy with the weight, as autograd keeps a plain weight.
                for _, layer in layers_below(self, module):
                    layer.state = copy.copy(layer.state)
            output = original(self, module, output)
            give_up(self, module)
            return output

        def post_forward(self, module, output):
            return offload(self, module, output) if self.offload else original(self, module, output)

        return post_forward

    def make_detach(original):
        def detach_hook(self, module):
            result = original(self, module)
            if self.offload:
                for name, layer in layers_below(self, module):
                    weight = layer.weight
                    if weight.is_meta or scales_of(layer) is not None or f"{name}SCB" not in self.weights_map:
                        continue
                    weight.SCB = self.weights_map[f"{name}SCB"].to(weight.device)
            return result

        return detach_hook

    def layers_below(hook, module):
        """The 8-bit layers whose weights the hook handles: (their prefix in its weights map, layer)."""
        if not hook.place_submodules:
            return [("", module)] if is_8bit(module) else []
        return [
            (f"{name}." if name else "", layer) for name, layer in module.named_modules() if is_8bit(layer)
        ]

    def is_8bit(module):
        return type(module).__name__ == "Linear8bitLt" and hasattr(module, "state")

    def scales_of(layer):
        scales = getattr(layer.weight, "SCB", None)
        return layer.state.SCB if scales is None else scales

    def give_up(hook, module):
        for _, layer in layers_below(hook, module):
            if layer.weight.is_meta:
                held = vars(layer.state)
                for name in held.keys() & _OF_THE_WEIGHT:
                    held[name] = None
                # Tiles are padded, and what comes back from the weights map is not.
                if layer.weight.shape != (shape := (layer.out_features, layer.in_features)):
                    layer.weight.data = torch.empty(shape, dtype=layer.weight.dtype, device="meta")

    draft.wrap_plain(hook_class, "init_hook", make_init)
    draft.wrap_plain(hook_class, "post_forward", make_post)
    draft.wrap_plain(hook_class, "detach_hook", make_detach)
