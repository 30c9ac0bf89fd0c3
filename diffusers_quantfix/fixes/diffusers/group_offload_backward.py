"""Group offloading moves weights away that the backward pass needs.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
    (when checking argument for argument weight in method wrapper_CUDA_native_layer_norm_backward)", or that of another
    layer, from ``backward()`` or ``torch.autograd.grad()`` after a pass of a model with ``enable_group_offload()``:
    Attend-and-Excite, Pix2Pix Zero, training without gradient checkpointing; with it and frozen norms, CheckpointError.
Cause: a layer's norms and convolutions save their weight itself for the backward pass, and group offloading moves it
    by assigning its ``.data``. ``torch.nn.Linear`` saves a view, which keeps the memory on the device.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L456; not
    reported.
Patch: where gradients are recorded, an offloaded module runs with ``torch.autograd.graph.saved_tensors_hooks`` that
    save a view of each weight; the hooks of gradient checkpointing, or of the program, get such views of frozen ones.
    Not before torch 2.8, which does not tell whether there are such hooks.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.versions import is_installed
from ...weights.wrappers import backend_of

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-backward",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "accelerate": "", "torch": ">=2.8"},
    patterns=(r"Expected all tensors to be on the same device.{0,200}_backward\)",),
    frames=(
        "torch/autograd/graph.py:_engine_run_backward",
        "group_offload",
        "attend_and_excite|pix2pix_zero",
    ),
    hot=True,
    since="0.1.0",
)


def broken(group_offloading: ModuleType) -> bool:
    """Move a group's weight after its layer ran: does the graph see the moved one?"""
    import torch

    if not is_installed("torch", ">=2.8"):
        return False
    hook = _hook(resolve(group_offloading, "GroupOffloadingHook"), torch)
    module = hook.group.onload_leader
    registry = resolve(group_offloading, "HookRegistry")(module)
    with torch.inference_mode(False), torch.enable_grad():
        module.weight = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        module.forward = lambda x: x * module.weight
        registry.register_hook(hook, "group_offloading")
        output = module(torch.zeros(1, device="cpu", requires_grad=True))
        module.weight.data = torch.ones(1, device="cpu")
        # Read and not run backward: the first backward pass starts torch's threads, and a process may fork later.
        return bool(output.grad_fn._saved_other.item())


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    # There torch no longer calls the hooks of a leaf that a Python function has saved, as quanto's saves its input.
    apart = ("optimum",) if is_installed("torch", "<2.10") else ()

    def make(original):
        def initialize_hook(self, module):
            # ``register_hook``, which calls this, puts a hook's ``new_forward`` in the place of the module's.
            self.new_forward = partial(run, self, apart)
            return original(self, module)

        return initialize_hook

    draft.wrap_plain(resolve(group_offloading, "GroupOffloadingHook"), "initialize_hook", make)


def run(hook: Any, apart: tuple[str, ...], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of ``module``, between the two halves of its ``hook``; as upstream for backends in ``apart``."""
    torch = sys.modules["torch"]
    forward = hook.fn_ref.original_forward
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    hooks = _hooks(torch)
    if hooks is None or (apart and any(backend_of(one) in apart for one in module.parameters())):
        return forward(*args, **kwargs)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        return forward(*args, **kwargs)


def _hooks(torch: Any) -> tuple[Any, Any] | None:
    """The hooks with which a module runs; None if ours are there already, or ``torch.func`` forbids them."""
    known = torch._C._autograd
    if not known._saved_tensors_hooks_is_enabled():
        return None
    theirs = known._top_saved_tensors_default_hooks(True)
    if theirs is None:
        return _save, _saved
    save, saved = theirs  # of gradient checkpointing, or of the program
    if save is _save or getattr(save, "func", None) is _save_apart:
        return None
    return partial(_save_apart, save), saved


def _save_apart(save: Any, tensor: Any) -> Any:
    """Gradient checkpointing keeps what has no gradient as it is, frozen weights too."""
    return save(tensor if tensor.requires_grad else tensor.detach())


def _save(tensor: Any) -> tuple[Any, int]:
    # A tensor of its own, which gets no new ``.data``, with the same memory and count of changes. Of what has a graph,
    # too: the graph would keep itself alive.
    return tensor.detach(), tensor._version


def _saved(kept: tuple[Any, int]) -> Any:
    """What was saved; torch itself does not ask whether it was changed since if there are hooks."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


class _Group:
    """What a hook reads from a group, for the probe; it moves nothing."""

    onload_self = True
    non_blocking = record_stream = False
    stream = None
    modules = parameters = ()

    def __init__(self, torch: Any) -> None:
        self.onload_device = self.offload_device = torch.device("cpu")
        self.onload_leader = self.offload_leader = torch.nn.Module()

    def onload_(self) -> None:
        """Nothing to move."""

    offload_ = onload_


def _hook(cls: Any, torch: Any) -> Any:
    hook = cls.__new__(cls)
    hook.group, hook.next_group = _Group(torch), None
    hook.config = type("Config", (), {"exclude_kwargs": None})
    return hook
