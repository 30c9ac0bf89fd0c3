"""What a run leaves on the devices although nothing asked for it to stay there."""

from __future__ import annotations

from collections.abc import Iterator

from tests import rig


def left(pipe, staying: set[str], buffers: bool) -> int:
    """Bytes on the devices beyond what may stay.

    May stay: the components named in ``staying`` and those that upstream keeps out of offload, what the pipeline and
    its schedulers remember, what modules that are no single layer cache (rotary tables for instance), and, with
    ``buffers``, all buffers.
    """
    _forget(pipe)
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in _allowed(pipe, staying | set(getattr(pipe, "_exclude_from_cpu_offload", ())), buffers)
        if tensor.device.type == "cuda"
    }
    return sum(rig.allocated(device) for device in range(rig.device_count())) - sum(storages.values())


def _forget(pipe) -> None:
    """Empty the caches that all instances of a class share: ``functools.lru_cache`` on a method, or in a wrapper."""
    for part in pipe.components.values():
        for kind in {type(module) for module in part.modules()} if hasattr(part, "modules") else ():
            for value in vars(kind).values():
                cells = getattr(value, "__closure__", None) or ()
                for function in (value, *(cell.cell_contents for cell in cells)):
                    if hasattr(function, "cache_clear"):
                        function.cache_clear()


def _allowed(pipe, staying: set[str], buffers: bool) -> Iterator:
    import torch

    from diffusers_quantfix.placement.tensors import held_tensors  # it imports torch

    for name, part in pipe.components.items():
        for held in held_tensors(name, part):
            cached = held.kind == "attribute" and not _is_layer(held.module)
            if name in staying or cached or (buffers and held.kind == "buffer"):
                yield held.tensor
    for name, value in vars(pipe).items():
        if not isinstance(value, torch.nn.Module) and name != "_all_hooks":
            yield from (held.tensor for held in held_tensors(name, value))


def _is_layer(module) -> bool:
    """Whether it is a layer with weights: what it keeps besides is not for the next run."""
    return module is not None and bool(module._parameters) and not module._modules
