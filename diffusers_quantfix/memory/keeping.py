"""`keep_host_copies`: weights that did not change on the device are not copied back to the CPU."""

from __future__ import annotations

from typing import Any

from ..placement.components import components_of, is_module
from ..placement.released import ReleasedError, released_message

__all__ = ["keep_host_copies"]


def keep_host_copies(pipe_or_model: Any, keep: bool = True, pin: bool = False) -> None:
    """Keep the copies on the CPU of weights that go to a device, and use them when the weights come back.

        pipe.enable_model_cpu_offload()
        qf.keep_host_copies(pipe)

    Without this, model offload (``enable_model_cpu_offload()``, ``pipe.to("cuda")`` and ``pipe.to("cpu")``) copies all
    weights back to the CPU each time, although inference does not change them. With it only those that did change are
    copied: after ``fuse_lora()``, training, or any other write into them. The content decides: it is compared through
    a checksum that the device computes, in which two different weights agree by chance once in billions of times.

    It costs the memory of the weights on the CPU also while they are on the device. Weights of optimum-quanto and
    torchao are kept inner tensor by inner tensor; those that the library packs anew for the device's kernel, and other
    tensor subclasses, are copied back as before. Sequential and group offload keep copies anyway.
    Memory of the CPU that the weights share with something else (an array, a mapped file) must not be written to
    while they are on the device.

    Args:
        pipe_or_model: a diffusers pipeline, a ``torch.nn.Module`` or a dict of components.
        keep: False to stop: the copies are given up, and everything is copied back as without this.
        pin: keep them in pinned memory, from which a GPU copies several times as fast, and which cannot be swapped out.

    Raises:
        TypeError: ``pipe_or_model`` is none of these.
        MemoryError: the CPU has less free memory than the weights that are on a device now; nothing has been changed.
        ReleasedError: it was released.
    """
    parts = components_of(pipe_or_model, "keep_host_copies")
    models = list({id(value): value for value in parts.values() if is_module(value)}.values())
    if message := next(filter(None, map(released_message, [pipe_or_model, *models])), ""):
        raise ReleasedError(message)
    if models:
        from . import host_copies

        if keep:
            host_copies.keep(models, pin)
        else:
            host_copies.stop(models)
