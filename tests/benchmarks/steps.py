"""A step of a Flux-sized transformer on a real GPU, in each offload mode."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator

from .figure import Row, figure
from .measure import CannotMeasure, child, children, not_measured

WAYS = ("resident", "model", "sequential", "leaf_level", "leaf_level, stream", "block_level, stream")


@figure("steps")
def steps() -> Iterator[Row]:
    """Seconds per step with us; without us where upstream works at all."""
    import torch

    if not torch.cuda.is_available():
        raise CannotMeasure("needs a real GPU")
    bandwidth = child("steps:bandwidth", package=False)
    yield Row("host to device, pinned memory", bandwidth / 1e9, "GB/s")
    for bits in (4, 8):
        calls = [("steps:seconds", bits, way) for way in WAYS]
        sides = [children(calls, package=package) for package in (True, False)]
        for way, with_us, without in zip(WAYS, *sides, strict=True):
            name = f"step of a {bits}-bit Flux transformer, {way}, with / without"
            if isinstance(with_us, CannotMeasure):
                yield not_measured(name, with_us)
                continue
            mine = f"{1000 * with_us['seconds']:.0f} ms"
            if isinstance(without, CannotMeasure):
                value, detail = None, f"{mine}; without: {without}"
            else:
                value = with_us["seconds"] / without["seconds"]
                detail = f"{mine} / {1000 * without['seconds']:.0f} ms"
            if way != "resident":
                detail += f"; the bus alone {1000 * with_us['bytes'] / bandwidth:.0f} ms"
            yield Row(name, value, detail=detail)


def bandwidth() -> float:
    """Bytes per second from pinned memory to the device."""
    import torch

    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = host.cuda()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(8):
        there.copy_(host, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return 8 * host.nbytes / (start.elapsed_time(end) / 1000)


@functools.cache
def _checkpoint() -> tempfile.TemporaryDirectory:
    """The folder with the random weights, in bf16; all measurements of a process share it."""
    import torch
    from diffusers import FluxTransformer2DModel

    folder = tempfile.TemporaryDirectory(prefix="benchmark-steps-")
    with torch.device("cuda"):
        whole = FluxTransformer2DModel(num_layers=3, num_single_layers=6, guidance_embeds=True).to(
            torch.bfloat16
        )
    whole.save_pretrained(folder.name)
    return folder


def seconds(bits: int, way: str) -> dict:
    """Seconds of the fastest of five steps of a random Flux transformer in bf16, and the bytes of the model."""
    import time

    import torch
    from diffusers import FluxTransformer2DModel

    from tests.rig import models

    from .memory import _bytes_of

    torch.set_grad_enabled(False)
    options = {"bnb_4bit_compute_dtype": torch.bfloat16} if bits == 4 else {}
    model = models.load_quantized(
        FluxTransformer2DModel, _checkpoint().name, bits, dtype=torch.bfloat16, **options
    )
    total = _bytes_of(model)
    here = torch.device("cuda", 0)
    if way == "model":
        from accelerate import cpu_offload_with_hook

        cpu_offload_with_hook(model, here)[1].offload()
    elif way == "sequential":
        from accelerate import cpu_offload

        cpu_offload(model.to("cpu"), here, offload_buffers=True)
    elif way != "resident":
        kind, _, stream = way.partition(", ")
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        model.to("cpu").enable_group_offload(
            here, torch.device("cpu"), offload_type=kind, use_stream=bool(stream), **blocks
        )
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 4096, 64, generator=generator, device=here),
        "encoder_hidden_states": torch.randn(1, 512, 4096, generator=generator, device=here),
        "pooled_projections": torch.randn(1, 768, generator=generator, device=here),
        "timestep": torch.ones(1, device=here),
        "guidance": torch.ones(1, device=here),
        "img_ids": torch.zeros(4096, 3, device=here),
        "txt_ids": torch.zeros(512, 3, device=here),
    }
    inputs = {name: tensor.to(torch.bfloat16) for name, tensor in inputs.items()}
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(**inputs)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return {"seconds": best, "bytes": total}
