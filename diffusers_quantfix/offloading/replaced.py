"""Host copies of tensors whose data the program has replaced since they were made.

Under group offloading with a stream, ``ModuleGroup`` keeps a host copy of each tensor (``cpu_param_dict``) and onloads
that, not what the tensor holds. An assignment to ``parameter.data``, as ``model.half()`` makes it for each parameter,
leaves the host copy behind.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys
from operator import attrgetter

from ..weights.wrappers import is_wrapper
from .transfers import accelerator, compute_stream, is_expected, is_in_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["renew_host_copies"]

_LAYOUTS = "_quantfix_layouts"

_dtype = attrgetter("dtype")


def renew_host_copies(group: Any) -> bool:
    """Give ``group`` host copies of what its tensors hold, where that is not their host copy, and those to the tensors.

    Args:
        group: a ``ModuleGroup`` with host copies that is about to be onloaded or prefetched. While it is in use, what
            is on its device are copies of the host copies; when it is prefetched, that may be in use by another group
            with the same parameter.

    Returns:
        whether there were such tensors.
    """
    torch = sys.modules["torch"]
    address_of, copies = torch.Tensor.data_ptr, group.cpu_param_dict
    with torch._C.DisableTorchFunctionSubclass():
        known = vars(group).get(_LAYOUTS)
        if known is None or known[0] is not copies:
            known = vars(group)[_LAYOUTS] = copies, _layouts(copies.values())
        if [*map(address_of, copies)] == [*map(address_of, copies.values())] and _layouts(copies) == known[1]:
            return False
        on_host_only, host = is_in_use(group) or is_expected(group), torch.device(group.offload_device).type
        replaced = [
            tensor
            for tensor, copy in copies.items()
            if not (address_of(tensor) == address_of(copy) and _layouts([tensor]) == _layouts([copy]))
            and not is_wrapper(tensor)
            and (tensor.device.type == host or not on_host_only)
        ]
    if not replaced:
        return False
    if any(tensor.device.type != host for tensor in replaced):
        accelerator(group).synchronize()  # they may still be written, on any stream
    # What replaced these may have freed copies of a group around this one, from the memory of the stream that copied
    # them, and may still read them: a model's own hook that casts all its weights does that.
    group.stream.wait_stream(compute_stream(group))
    now = group._init_cpu_param_dict()
    renewed = {tensor: now[tensor] for tensor in replaced if tensor in now}
    group.cpu_param_dict = copies | renewed
    del vars(group)[_LAYOUTS]  # which keeps the copies from before
    for tensor, copy in renewed.items():
        tensor.data = copy
    return True


def _layouts(tensors: Iterable[Any]) -> list[Any]:
    """What besides the address tells one view of a memory from another."""
    tensors, cls = list(tensors), sys.modules["torch"].Tensor
    return [*map(cls.stride, tensors), *map(cls.numel, tensors), *map(_dtype, tensors)]
