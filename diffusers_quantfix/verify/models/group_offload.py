"""A model under group offloading, for the cases of every backend."""

from __future__ import annotations

from ..case import CannotReproduce, NeedsDevice
from .devices import cuda

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def apply(model: Any, device: Any, **options: Any) -> None:
    """Group-offload ``model`` from ``device`` to the CPU, at leaf level unless ``options`` say otherwise.

    Raises:
        CannotReproduce: this diffusers has no group offloading.
        NeedsDevice: this diffusers needs a CUDA device for that.
    """
    import torch

    try:
        from diffusers.hooks import apply_group_offloading
    except ImportError:
        raise CannotReproduce("this diffusers has no group offloading") from None
    options = {"offload_type": "leaf_level", **options}
    try:
        apply_group_offloading(model, onload_device=device, offload_device=torch.device("cpu"), **options)
    except AttributeError:
        if not hasattr(torch, "accelerator") or torch.accelerator.current_accelerator() is not None:
            raise
        # Before 0.42 it reads the accelerator's type.
        raise NeedsDevice("needs a CUDA device: this diffusers offloads groups to one only") from None


def check(build: Callable[[Any], Any], run: Callable[[Any, Any], Any], times: int = 3, **options: Any) -> str:
    """Offload the model of ``build(device)``, run it, and check its output and the memory left on the GPU.

    Args:
        build: returns the quantized model on a device.
        run: runs the model on a device, and returns the output on the CPU.
        times: the number of runs.
        options: options of ``apply_group_offloading``.

    Raises:
        NeedsDevice: there is no CUDA device.
        CannotReproduce: this diffusers has no group offloading.
    """
    import gc
    import time

    import torch

    device = cuda()
    reference = run(build(device), device)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    model = build(device)
    size = torch.cuda.memory_allocated(device) - before
    apply(model, device, **options)
    for _ in range(times):  # with a stream, the second pass is the first with full prefetching
        error = (run(model, device) - reference).abs().max().item()
        assert error == 0, f"maximum error {error:.3g}"
        gc.collect()
        left = torch.cuda.memory_allocated(device) - before
        for _ in range(100):  # autograd frees a graph in a thread of its own
            if left <= 0:
                break
            time.sleep(0.01)
            left = torch.cuda.memory_allocated(device) - before
        assert left <= 0, f"{left} of {size} bytes are still on {device} after a run"
    return f"0 of {size} bytes are on {device} between two runs; output exact"


def by_blocks(model: Any) -> None:
    """Enable block-level group offload of ``model``, from the CPU to the CPU.

    Raises:
        CannotReproduce, NeedsDevice: as `apply`.
    """
    import torch

    apply(model, torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)


def layers(bits: int) -> Callable[[Any], Any]:
    """``build`` for `check`: a sequence of 4-bit or 8-bit bitsandbytes layers, with 16-bit activations."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    def build(device: Any) -> Any:
        torch.manual_seed(0)
        if bits == 4:
            parts = [Linear4bit(256, 256, compute_dtype=torch.float16, quant_type="nf4") for _ in range(3)]
        else:
            parts = [Linear8bitLt(256, 256, has_fp16_weights=False, threshold=6.0) for _ in range(3)]
        return torch.nn.Sequential(*parts).half().to(device).eval()

    return build


def run(model: Any, device: Any) -> Any:
    """``run`` for `check`: the output for 32 rows of 256 features, computed in the dtype of the biases."""
    import torch

    inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(inputs.to(device, model[0].bias.dtype)).float().cpu()
