"""4-bit kernels leave the current CUDA device changed.

Symptom: after a 4-bit layer was quantized or ran on ``cuda:1``, ``torch.cuda.current_device()`` is 1: the next
    ``tensor.cuda()`` and the next model loaded without a ``device_map`` use the wrong GPU.
Cause: four functions of ``bitsandbytes.functional`` switch to the device of their tensor and switch "back" to the same
    one, ``post_call(A.device)`` instead of ``post_call(prev_device)``. They and ``gemv_4bit`` do not switch back at all
    when they raise.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.45.0; fixed in 0.45.0, which switches
    with a context manager.
Patch: each of these functions restores the current device, even when it raises.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="bnb-current-device",
    module="bitsandbytes.functional",
    claims={"bitsandbytes": ">=0.43.0,<0.45.0"},
    harm="other",
    patterns=(r"current(_| )device(\(\))? has changed",),
    frames=("4.?bit", "bitsandbytes/"),
    fixed_in="bitsandbytes 0.45.0",
    hot=True,
)

_NAMES = ("quantize_blockwise", "dequantize_blockwise", "quantize_4bit", "dequantize_4bit", "gemv_4bit")


def broken(functional: ModuleType) -> bool:
    """Does one of the functions store the previous device and never read it?

    The probe reads the code: without CUDA there is no current device to observe.
    """
    import dis

    for name in _NAMES[:4]:
        code = resolve(functional, f"{name}").__code__
        if "pre_call" in code.co_names and not any(
            instruction.opname.startswith("LOAD_FAST") and "prev_device" in str(instruction.argval)
            for instruction in dis.get_instructions(code)
        ):
            return True
    return False


def patch(functional: ModuleType, draft: Draft) -> None:
    from torch import cuda

    def make(original):
        def back_on_the_device(*args, **kwargs):
            if (
                not cuda.is_initialized()
            ):  # no tensor is on a GPU; blockwise quantization runs on the CPU as well
                return original(*args, **kwargs)
            before = cuda.current_device()
            try:
                return original(*args, **kwargs)
            finally:
                if cuda.current_device() != before:
                    cuda.set_device(before)

        return back_on_the_device

    for name in _NAMES:
        draft.wrap_plain(functional, name, make)
