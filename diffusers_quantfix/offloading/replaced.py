"""Host copies of tensors whose data the program has replaced since they were made.

Under group offloading with a stream, ``ModuleGroup`` keeps a host copy of each tensor (``cpu_param_dict``) and onloads
that, not what the tensor holds. An assignment to ``parameter.data``, as ``model.half()`` makes it for each parameter,
leaves the host copy behind.

Upstream: diffusers/hooks/group_offloading.py (``ModuleGroup``).
"""

from __future__ import annotations

import sys

from ..weights.wrappers import is_wrapper
from .group_tensors import layouts
from .transfers import accelerator, compute_stream, is_expected, is_in_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["MARK", "follows_data", "forget_copies", "host_copies", "renew_host_copies"]

# On the ``onload_`` of groups that call `renew_host_copies`.
MARK = "_quantfix_renews"
_KNOWN = "_quantfix_copied"
_SWAPPED = (
    "A weight of class {} was put into a plain parameter under group offloading with a stream, which has a host copy "
    "of what was there. Exchange such weights before group offloading is applied."
)


def follows_data(group: Any) -> bool:
    """Whether ``group`` calls `renew_host_copies` when it is onloaded."""
    return hasattr(type(group).onload_, MARK)


def renew_host_copies(group: Any) -> bool:
    """Give ``group`` host copies of what its tensors hold, where that is not their host copy, and those to the tensors.

    Args:
        group: a ``ModuleGroup`` with host copies that is about to be onloaded or prefetched.

    Returns:
        whether there were such tensors.
    """
    copies = group.cpu_param_dict
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        known = vars(group).get(_KNOWN)
        if known is None or known[0] is not copies:
            known = vars(group)[_KNOWN] = copies, *_compared(copies)
        tensors, expected = known[1:]
        if _states(tensors) == expected:
            return False
        replaced = [tensor for tensor in tensors if _is_replaced(group, tensor, copies[tensor])]
    if replaced or is_in_use(group) or is_expected(group):
        # What has replaced data, here after an interrupted pass, or in a group around this one, may have freed copies
        # that it still reads, from the memory of the stream that made them.
        group.stream.wait_stream(compute_stream(group))
    if not replaced:
        return False
    for tensor in replaced:
        if 0 in tensor.stride():  # an expanded one has no memory of its own that could be pinned
            tensor.data = tensor.data.contiguous()
    now = host_copies(group)
    renewed = {tensor: now[tensor] for tensor in replaced if tensor in now}
    group.cpu_param_dict = {tensor: copy for tensor, copy in copies.items() if tensor in now} | renewed
    for tensor, copy in renewed.items():
        tensor.data = copy
    return True


def host_copies(group: Any) -> dict[Any, Any]:
    """Tensor -> a new host copy of it, for all tensors of ``group``."""
    forget_copies(group)
    # In inference mode they would be inference tensors, and the weights that get them could never be trained.
    with sys.modules["torch"].inference_mode(False):
        copies: dict[Any, Any] = group._init_cpu_param_dict()
    return copies


def forget_copies(group: Any) -> None:
    """Look the host copies of ``group`` up again; to be called where some are exchanged in the dictionary itself."""
    vars(group).pop(_KNOWN, None)


def _compared(copies: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """The tensors that can be compared with their host copies, and what `_states` says while they hold these."""
    tensors, hosts = list(copies), list(copies.values())
    try:
        _states(tensors)
        return tensors, _states(hosts)
    except (RuntimeError, NotImplementedError):  # sparse and nested ones have no address, or no strides
        dense = [pair for pair in zip(tensors, hosts, strict=True) if all(map(_is_dense, pair))]
        return [tensor for tensor, _ in dense], _states([host for _, host in dense])


def _is_dense(tensor: Any) -> bool:
    try:
        return bool(_states([tensor]))
    except (RuntimeError, NotImplementedError):
        return False


def _is_replaced(group: Any, tensor: Any, copy: Any) -> bool:
    """Whether ``tensor`` holds data that is neither its host copy ``copy`` nor was made of one.

    Another group with the same parameter may have it on the device, or have made a host copy of its own.
    """
    if is_wrapper(tensor):
        if not is_wrapper(copy):  # its host copy would be taken for it
            raise RuntimeError(_SWAPPED.format(type(tensor).__name__))
        return False
    if tensor.is_meta:
        return False
    on_host, alike = tensor.device == copy.device, layouts([tensor]) == layouts([copy])
    if on_host and alike and tensor.data_ptr() == copy.data_ptr():
        return False
    if not on_host:
        if is_expected(group):  # of a prefetched one it is seen when it is used
            return False
        if not alike:
            return not is_in_use(group)  # a hook in an interrupted pass may have cast it
        accelerator(group).synchronize(tensor.device)  # it may still be written, on any stream
    return not (alike and _are_equal(tensor, copy))


def _are_equal(tensor: Any, copy: Any) -> bool:
    torch = sys.modules["torch"]
    # Not ``detach()``, which parameters made in inference mode do not have outside of it.
    one, other = (each.data.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, copy))
    return bool(torch.equal(one, other))


def _states(tensors: list[Any]) -> list[Any]:
    return [*map(sys.modules["torch"].Tensor.data_ptr, tensors), *layouts(tensors)]
