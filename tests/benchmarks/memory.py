"""Bytes: what stays on a device, what travels, and how high the peak is. On a real GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .figure import Row, figure
from .measure import CannotMeasure, children, not_measured

WAYS = ("sequential", "leaf_level", "block_level")


@figure("memory")
def memory() -> Iterator[Row]:
    """8-bit models that move, and every kind of offload: counts, so that one process for each side is enough."""
    calls = [(f"memory:{name}",) for name in ("moved", "sequential_left", "back")]
    calls += [("memory:traffic", bits) for bits in (4, 8)]
    calls += [("memory:peak", bits, way) for bits in (4, 8) for way in WAYS]
    ours, theirs = (dict(zip(calls, children(calls, package=side), strict=True)) for side in (True, False))
    for what, call, goal in (
        ('8-bit, left on the device after .to("cpu")', ("memory:moved",), 0.0),
        ("8-bit, left after one sequentially offloaded run", ("memory:sequential_left",), 0.0),
        ("8-bit, memory back on the device / before", ("memory:back",), 1.0),
    ):
        yield _row(what, ours[call], theirs[call], "x" if goal else "%", goal, exact=True)
    for bits in (4, 8):
        one, other = ours["memory:traffic", bits], theirs["memory:traffic", bits]
        for name, what, unit, goal in (
            ("h2d", "host to device per run / bytes of weights and states", "x", 1.0),
            ("d2h", "device to host per run", "bytes", 0.0),
        ):
            pair = [said if isinstance(said, Exception) else said[name] for said in (one, other)]
            yield _row(f"{bits}-bit sequential: {what}", *pair, unit, goal, exact=True)
    for bits in (4, 8):
        for way in WAYS:
            what = f"{bits}-bit {way.replace('_', ' ')} offload: peak / (largest group + activations)"
            call = ("memory:peak", bits, way)
            yield _row(what, ours[call], theirs[call], "x", 1.1)


def _row(what: str, ours: Any, theirs: Any, unit: str, goal: float, exact: bool = False) -> Row:
    if isinstance(ours, CannotMeasure):
        return not_measured(what, ours, goal)
    detail = f"without: {theirs}"[:110] if isinstance(theirs, Exception) else f"without: {theirs:.4g} {unit}"
    return Row(what, ours, unit, goal, exact, detail=detail)


def _devices():
    """The ``gpu`` fixture's devices, outside of pytest."""
    import contextlib

    import torch

    from tests import rig
    from tests.rig.fixtures import RealDevices, RigDevices

    stack = contextlib.ExitStack()
    if torch.cuda.is_available():
        return stack, RealDevices()
    if reason := rig.unavailable_reason():
        raise CannotMeasure(f"no CUDA device, and the rig is not available: {reason}")
    stack.enter_context(rig.devices())
    return stack, RigDevices()


def _flux(bits: int, layers: int = 4):
    """A quantized Flux transformer of four blocks, loaded from disk."""
    import tempfile

    import torch
    from diffusers import FluxTransformer2DModel

    from tests.rig import models

    torch.set_grad_enabled(False)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    whole = models.flux_transformer(
        num_layers=layers // 2, num_single_layers=layers // 2, attention_head_dim=64, num_attention_heads=4,
        axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    return models.load_quantized(FluxTransformer2DModel, models.saved(whole, folder), bits)


def _run(model, device):
    from tests.rig import models

    return models.call_flux(models.flux_pipeline(model), device=device)


def moved() -> float:
    """Percent of an 8-bit model's bytes that stay on the device after ``.to("cpu")``, after a forward pass."""
    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        before = gpu.allocated(here)
        model = _flux(8)
        _run(model, here)
        held = gpu.allocated(here) - before
        model.to("cpu")
        return 100 * (gpu.allocated(here) - before) / held


def back() -> float:
    """Bytes of an 8-bit model on the device after a trip to the CPU, by those before it."""
    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        model = _flux(8)
        _run(model, here)
        before = gpu.allocated(here)
        model.to("cpu").to(here)
        return gpu.allocated(here) / before


def sequential_left() -> float:
    """Percent of an 8-bit model's bytes that stay on the device after one run under sequential offload."""
    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        before = gpu.allocated(here)
        model = _flux(8)
        held = gpu.allocated(here) - before
        _place(model, "sequential", here)
        _forward(model, here)
        return 100 * (gpu.allocated(here) - before) / held


def traffic(bits: int) -> dict:
    """Bytes that travel per sequentially offloaded run, by the bytes of the model, in its second run."""
    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        if gpu.kind == "cuda":
            raise CannotMeasure("the bytes copied between real devices are not counted")
        model = _flux(bits)
        total = _bytes_of(model)
        _place(model, "sequential", here)
        inputs = _inputs(here)
        model(**inputs)
        gpu.reset()
        model(**inputs)
        found = gpu.traffic()
        return {"h2d": found.h2d / total, "d2h": found.d2h}


def peak(bits: int, way: str) -> float:
    """The most bytes on the device in an offloaded run, by the largest group plus the activations."""
    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        model = _flux(bits)
        inputs = _inputs(here)
        gpu.reset()
        before = gpu.allocated(here)
        model(**inputs)
        activations = gpu.peak(here) - before
        largest = _largest_group(model, way)
        _place(model, way, here)
        model(**inputs)
        gpu.reset()
        model(**inputs)
        return (gpu.peak(here) - _held(inputs)) / (largest + activations)


def _held(inputs) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in inputs.values())


def _inputs(device) -> dict:
    import torch

    from diffusers_quantfix.verify.models import flux

    return {name: tensor.to(device, torch.float16) for name, tensor in flux.inputs(tokens=16).items()}


def _forward(model, device):
    return model(**_inputs(device)).sample


def _place(model, way: str, device) -> None:
    import torch

    if way == "sequential":
        from accelerate import cpu_offload

        model.to("cpu")
        cpu_offload(model, device, offload_buffers=True)
    else:
        blocks = {"num_blocks_per_group": 1} if way == "block_level" else {}
        model.enable_group_offload(device, torch.device("cpu"), offload_type=way, **blocks)


def _bytes_of(model) -> int:
    """The bytes of the weights of ``model`` with all that belongs to them."""
    from tests.fixes.four_bit import bytes_of

    return bytes_of(model)


def _largest_group(model, way: str) -> int:
    """The bytes of the largest thing that one onload brings: a layer, or a block."""
    if way == "block_level":
        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        rest = _bytes_of(model) - sum(map(_bytes_of, blocks))
        # what is in no block stays on the device during the pass: upstream's own design
        return max(map(_bytes_of, blocks)) + rest
    return max(_bytes_of(module) for module in model.modules() if not list(module.children()))
