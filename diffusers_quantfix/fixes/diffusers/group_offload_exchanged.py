"""Group offloading with a stream raises KeyError for what came into the model later.

Symptom: KeyError "Parameter containing: tensor(...)" from ``pinned_memory[param]`` in a run under
    ``enable_group_offload(use_stream=True)``, after a layer, a parameter or a buffer of the model was exchanged: by
    Versatile Diffusion, which swaps blocks of its two UNets in each call, by an adapter, or by the program.
Cause: ``ModuleGroup`` moves what its modules hold at that moment, but looks for host copies among those that it made
    when it was set up.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L222; not
    reported.
Patch: if one is missing, the group makes the host copies of what is new, forgets those of what is gone, and goes on.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.group_tensors import forget_backends
from ...offloading.replaced import host_copies
from ...offloading.uncompiled import uncompiled, within

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-exchanged",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(
        r"pinned_memory\[(param|buffer)\].{0,400}KeyError: (Parameter containing|tensor)",
        r"cpu_param_dict\[(param|buffer)\].{0,400}KeyError: (Parameter containing|tensor)",
    ),
    frames=("group_offloading.py:_process_tensors_from_modules", "group_offload", "use_stream"),
    since="0.1.0",
    hot=True,
)

_MOVES = ("onload_", "offload_")
_MARK = "_quantfix_admits"


def broken(group_offloading: ModuleType) -> bool:
    """Offload a group with a parameter that it has no host copy of: is that an error?"""
    import torch

    cls = resolve(group_offloading, "ModuleGroup")
    module = torch.nn.Linear(1, 1, bias=False)
    group = cls.__new__(cls)
    group.modules, group.parameters, group.buffers = [module], [], []
    group.offload_leader, group.stream, group.record_stream = module, _Stream(), True
    group.onload_device = group.offload_device = torch.device("cpu")
    group.low_cpu_mem_usage = True
    group.offload_to_disk_path, group.cpu_param_dict = None, {module.weight.clone(): module.weight.data}
    try:
        group.offload_()
    except KeyError:
        return True
    except AttributeError:  # 0.34.0 asks for the accelerator, where there is none
        return not hasattr(cls.offload_, _MARK)
    return False


class _Stream:
    """For the probe: there is nothing to wait for."""

    def synchronize(self) -> None:
        pass


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    def make(original):
        original = within(original)

        def move(self):
            try:
                original(self)
            except KeyError:
                if not admit(self):
                    raise
                original(self)

        move.__name__ = original.__name__
        wrapped = uncompiled(move)
        setattr(wrapped, _MARK, True)  # other fixes' wrappers around it have it too
        return wrapped

    group = resolve(group_offloading, "ModuleGroup")
    resolve(group, "_init_cpu_param_dict")
    for name in _MOVES:
        draft.wrap_plain(group, name, make)


def admit(group: Any) -> bool:
    """Give ``group`` host copies of what its modules hold now, and no others.

    What it had copied keeps that copy: on the device there may be half of a transfer.

    Returns:
        whether there was something new.
    """
    if group.stream is not None:
        group.stream.synchronize()  # no copy of what is still on its way
    before = group.cpu_param_dict
    now = host_copies(group)
    group.cpu_param_dict = {tensor: before.get(tensor, copy) for tensor, copy in now.items()}
    forget_backends(group)  # the next move is theirs
    return not now.keys() <= before.keys()
