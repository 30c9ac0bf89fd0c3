"""Moving a model leaves its 8-bit weights on the old device.

Symptom: after ``model.to("cpu")`` 95 % of an 8-bit model stays on the GPU, and back on the GPU it takes 1.9 times the
    memory; a forward pass on the new device raises "Expected all tensors to be on the same device" or "All input
    tensors need to be on the same GPU"; ``enable_model_cpu_offload`` frees nothing; ``.to("meta")`` and the swap mode
    of torch raise "Creating a Parameter from an instance of type Int8Params requires that detach() returns".
Cause: a parent moves its layers with ``child._apply(fn)``. ``nn.Module._apply`` keeps the bytes of what ``fn`` returned
    and drops the rest: the moved CB and SCB, which are attributes of the parameter before the first forward pass and of
    ``layer.state`` after it. ``Linear8bitLt.to`` (0.48.0) is not called on this path. If the bytes cannot be put into
    the old parameter (meta, swap mode), ``_apply`` builds a plain Parameter. Up to 0.47.0 ``fn`` also quantizes the
    quantized weight again when it moves back to the GPU, which loses its scales.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1332 and
    https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1793,
    https://github.com/huggingface/diffusers/issues/11329 and https://github.com/huggingface/diffusers/issues/10653;
    open.
Patch: ``_apply`` of the two layers with an 8-bit weight. Upstream moves bias and buffers. ``fn`` receives the plain
    int8 data, so that nothing is quantized twice. CB becomes the new ``weight.data``, never a copy of it. SCB and all
    other tensors of the state are moved to its device, without a cast. Every kind of move calls ``_apply``: moving the
    layer itself or a parent, ``.cuda()``, ``.to_empty()``. A forward pass does not.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import offloaded_eight_bit as in_use  # noqa: F401
from ...weights import companions

FIX = Fix(
    __doc__,
    id="bnb-linear8bit-move",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=(
        r"Creating a Parameter from an instance of type Int8Params requires that detach\(\)",
        r"_apply\(\): Couldn't swap (Linear8bitLt|\w*8bit)\.weight",
        "Expected all tensors to be on the same device",
    ),
    frames=(
        "MatMul8bitLt",
        "int8_mixed_scaled_mm",
        "Linear8bitLt|Embedding8bit|load_in_8bit",
        "bitsandbytes/nn/modules.py",
    ),
    hot=True,
)

# Both are the matrix of ``weight.data``: CB in rows, CxB (before 0.45) in the layout of the GPU.
_ALIASES = ("CB", "CxB")
_COMPANIONS = (*_ALIASES, "SCB")


def broken(modules: ModuleType) -> bool:
    """Move a quantized layer through a parent to ``meta``, a device that always exists."""
    import torch

    layer_class = resolve(modules, "Linear8bitLt")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight = modules.Int8Params(torch.zeros(1, 1, dtype=torch.int8), requires_grad=False)
    layer.weight.CB, layer.weight.SCB = layer.weight.data, torch.zeros(1)
    try:
        torch.nn.Sequential(layer)._apply(lambda tensor: tensor.to("meta"))
    except RuntimeError:
        return True
    weight = layer.weight
    if not isinstance(weight, modules.Int8Params) or weight.CB is None or weight.SCB is None:
        return True
    return not (weight.CB.is_meta and weight.SCB.is_meta)


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    int8_params = resolve(modules, "Int8Params")

    def make(original):
        def _apply(self, fn, recurse=True):
            weight = self._parameters.get("weight")
            if not isinstance(weight, int8_params):
                return original(self, fn, recurse)
            address, device, cls, held = weight.data_ptr(), weight.device, type(weight), dict(vars(weight))

            def moved(tensor):
                if tensor is not weight:
                    return fn(tensor)
                if weight.dtype == torch.int8:
                    return fn(weight.data)
                result = fn(weight)  # quantizes a 16-bit weight that moves from the CPU
                held.update(vars(weight))
                return result.data  # nn.Module._apply cannot make a Parameter from an Int8Params

            original(self, moved, recurse)
            new = self._parameters["weight"]
            if new is weight and address and new.data_ptr() == address and all_here(self, new, device):
                return self  # nothing has moved; the walk over the companions would take ten times as long
            if type(new) is not cls:
                new.__class__ = cls
                vars(new).update(held)
            follow(self, new)
            return self

        return _apply

    def all_here(layer, weight, device):
        """Whether the weight and the companions that can be checked without a search are on ``device``."""
        if weight.device != device:
            return False
        for holder in (weight, layer.__dict__.get("state")):
            held = holder.__dict__ if holder is not None else {}
            for name in _COMPANIONS:
                tensor = held.get(name)
                if tensor is not None and tensor.device != device:
                    return False
        return True

    def follow(layer, weight):
        """Move the companions of ``layer`` to the device of ``weight``."""
        for found in companions.companions(layer):
            tensor = found.tensor
            if is_weight(found, weight):
                new = weight.data
            elif tensor.device == weight.device:
                continue
            elif tensor.is_meta:
                new = torch.empty_like(tensor, device=weight.device)  # as to_empty() does with the weight
            else:
                new = tensor.to(weight.device)
            setattr(found.holder, found.attribute, new)

    def is_weight(found, weight):
        tensor = found.tensor
        # A layer with has_fp16_weights keeps a 16-bit weight, and its quantized version in CB: a different matrix.
        return found.attribute in _ALIASES and tensor.dtype == weight.dtype and tensor.shape == weight.shape

    draft.wrap_plain(resolve(modules, "Linear8bitLt"), "_apply", make)
    if hasattr(modules, "Embedding8bit"):  # from 0.44.0 on
        draft.wrap_plain(modules.Embedding8bit, "_apply", make)
