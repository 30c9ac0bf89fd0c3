"""`keep_host_copies`: weights that did not change on the device are not copied back to the CPU."""

from __future__ import annotations

from typing import Any

from ..placement.components import components_of, is_module
from ..placement.released import ReleasedError, released_message
from ..torch_modes import unobserved

__all__ = ["keep_host_copies"]


@unobserved
def keep_host_copies(pipe_or_model: Any, keep: bool = True, pin: bool = False) -> None:
    """Keep host copies of weights that move to a device, and use them when the weights come back.

        pipe.enable_model_cpu_offload()
        qf.keep_host_copies(pipe)

    Without this, model offload (``enable_model_cpu_offload()``, ``pipe.to("cuda")`` and ``pipe.to("cpu")``) copies all
    weights back to the CPU each time, although inference does not change them. With it only changed weights are copied:
    after ``fuse_lora()``, training, or any other write to them. The contents are compared by a checksum that the device
    computes; two different weights have the same one by chance once in billions of times.

    The weights take host memory also while they are on the device. optimum-quanto and torchao weights are kept by inner
    tensor; weights that the library repacks for the device's kernel, and other tensor subclasses, are copied back as
    without this. Sequential and group offload keep copies anyway. Do not write to host memory that the weights share
    with other objects (an array): they have it again when they are back. Weights that are mapped from a file
    (safetensors) are copied when they first leave it, on Linux; elsewhere, do not change the file. cloudpickle and dill
    write a class of ``__main__`` as a whole; while copies of one of its instances are kept, such a file needs this
    package.

    Args:
        pipe_or_model: a diffusers pipeline, a ``torch.nn.Module`` or a dict of components.
        keep: False to stop: the copies are dropped, and all weights are copied back as without this.
        pin: keep them in pinned memory, from which a GPU copies several times as fast; it cannot be swapped out.

    Raises:
        TypeError: ``pipe_or_model`` is none of these.
        MemoryError: less host memory is free than the weights now on a device need; nothing has been changed.
        ReleasedError: ``pipe_or_model`` or a model in it was released.
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
