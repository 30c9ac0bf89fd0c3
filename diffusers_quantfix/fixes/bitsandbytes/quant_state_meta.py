"""4-bit weights lose their quant state under sequential offload.

Symptom: a 4-bit model under ``enable_sequential_cpu_offload``, ``accelerate.cpu_offload`` or ``disk_offload`` raises
    NotImplementedError "Cannot copy out of meta tensor; no data!" (bitsandbytes >= 0.46.1), or ValueError "Blockwise
    quantization only supports 16/32-bit floats, but got torch.uint8" (<= 0.45.5; RuntimeError in 0.46.0).
Cause: accelerate keeps the packed weight in host memory and puts the parameter on ``meta`` between uses. It does not
    handle the quant state, and ``Params4bit.to("meta")`` moves the tensors of the one QuantState that old and new
    parameter share: after that, absmax and code have no data anywhere. Up to 0.46.0 the moved parameter also loses its
    quantized flag, so it is quantized a second time when moved back.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1525, closed as not planned;
    https://github.com/huggingface/diffusers/issues/10800.
Patch: every offload calls ``Params4bit.to``. A parameter moved to ``meta`` gets a host copy of the quant state, and the
    source keeps its own unchanged. A parameter moved back gets its own quant state on the device, created from the host
    copy and freed with the parameter: nothing is ever copied back to the host. All other moves are left to upstream,
    which changes the shared quant state in place: ``nn.Module.to`` relies on it. A product with a weight that is still
    on ``meta`` raises torch's error.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import four_bit_on_meta as in_use  # noqa: F401
from ...weights import companions, params_4bit

FIX = Fix(
    __doc__,
    id="bnb-quant-state-meta",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=(
        "Cannot copy out of meta tensor; no data",
        r"uantization only supports 16/32-bit floats, but got torch\.uint8",
        "is not on the expected device meta",
        r"Tensor\.item\(\) cannot be called on meta tensors",
    ),
    frames=(
        "bitsandbytes/functional.py:to",
        "bitsandbytes/nn/modules.py",
        "accelerate/utils/modeling.py:set_module_tensor_to_device",
        "4.?bit|nf4|fp4|Params4bit",
    ),
    hot=True,
)


def broken(modules: ModuleType) -> bool:
    """Move a small quantized parameter to ``meta`` and back, as accelerate does."""
    resolve(modules, "Params4bit.to")
    parameter, _ = params_4bit.tiny_parameter(modules)
    offloaded = parameter.to("meta")
    if parameter.quant_state.absmax.is_meta or not offloaded.bnb_quantized:
        return True
    back = modules.Params4bit(parameter.data, requires_grad=False, **vars(offloaded)).to("cpu")
    return back.quant_state.absmax.is_meta or not back.bnb_quantized


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    parse = torch._C._nn._parse_to
    # Comparing devices is six times as fast as reading a device's type.
    meta = (torch.device("meta"), torch.device("meta", 0))

    def make(original):
        def to(self, *args, **kwargs):
            state = self.__dict__.get("quant_state")
            if state is None:
                return original(self, *args, **kwargs)
            device = parse(*args, **kwargs)[0]
            if device in meta:
                params_4bit.unpack(self)
                return moved(self, state, companions.host_copy(state), args, kwargs)
            if "_is_host_copy" in state.__dict__ and device is not None and self.bnb_quantized:
                return moved(self, state, companions.on_device(state, device), args, kwargs)
            result = original(self, *args, **kwargs)
            if self.bnb_quantized and not result.bnb_quantized:  # up to 0.46.0
                result.bnb_quantized = True
            return result

        return to

    def moved(self, state, new_state, args, kwargs):
        """The parameter moved by ``.to``, with ``new_state``; ``self`` keeps ``state``."""
        result = params_4bit.moved(self, new_state, args, kwargs)
        # While the layer still owns ``self``, it needs its current quant state.
        if not params_4bit.belongs_to_layer(self):
            params_4bit.follow(self, state, new_state)
        return result

    def make_fake(original):
        def kernel(A, B, *args, **kwargs):
            if B.device.type == "meta" != A.device.type:
                raise RuntimeError(f"Tensor on device meta is not on the expected device {A.device}!")
            return original(A, B, *args, **kwargs)

        return kernel

    draft.wrap_plain(resolve(modules, "Params4bit"), "to", make)
    for kernel in _fake_kernels():
        draft.wrap_plain(kernel, "func", make_fake)


def _fake_kernels() -> list[Any]:
    """What torch calls for a product with a weight on ``meta``: it gives memory that nobody has written to."""
    import torch
    from torch._library.simple_registry import singleton

    kernels = []
    for name in ("gemm_4bit", "gemv_4bit"):
        if hasattr(torch.ops.bitsandbytes, name):  # else `find` would add it
            fake = getattr(singleton.find(f"bitsandbytes::{name}"), "fake_impl", None)
            kernels.append(getattr(fake, "kernel", None))
    return [kernel for kernel in kernels if kernel is not None]
