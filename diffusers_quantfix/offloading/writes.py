"""What was changed in place in a group while it was on its device.

torch counts the writes to a tensor (``_version``), but not those of fused optimizers and through ``.data``. Within a
pass only modules in training mode make these, to their buffers. But a group may stay on its device from one pass to the
next, after a backward pass with checkpoints or an exception, and then the program may have changed it there. So its
plain parameters are copied back; its quantized weights only after a counted write, for all of a model would travel
after each training step.

Upstream: torch/_C/_autograd.pyi (``_version``).
"""

from __future__ import annotations

import sys

from .counters import version_of, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .inventory import Inventory, Look

__all__ = ["changed_slots", "may_be_written", "note_versions", "versions_of"]


def note_versions(inventory: Inventory, look: Look, moved: Sequence[Any]) -> None:
    """Note the versions of a group's plain parameters when it has been onloaded.

    One that was on the device already loses its own: optimizers and averages write to such parameters in ways that
    torch does not count.

    Args:
        inventory: of the group.
        look: the group's state before.
        moved: its tensors now, by slot.
    """
    for slot, indices in inventory.plain.items():
        # Not by identity: ``.data`` returns a new object each time.
        is_moved = moved[slot].device != look.tensors[slot].device
        for index in indices:
            parameter = look.parameters[index]
            inventory.versions[id(parameter)] = version_of(parameter) if is_moved else None


def changed_slots(inventory: Inventory, look: Look, training: bool) -> tuple[set[int], list[int | None]]:
    """The slots of a group that is offloaded whose tensors were changed, or may have been.

    Args:
        inventory: of the group.
        look: its present state.
        training: whether gradients are computed: all plain parameters count as changed.

    Returns:
        The slots, and the versions to expect when the group is offloaded; none if they are the expected ones.
    """
    now = versions(inventory.quantized(look))
    as_expected = now == inventory.expected
    changed = set() if as_expected else inventory.rewritten(now)
    noted = inventory.versions
    for slot, indices in inventory.plain.items():
        for index in indices:
            if training or not _is_unchanged(look.parameters[index], noted):
                changed.add(slot)
                break
    for slot, module, buffer in inventory.buffers(look):
        if may_be_written(module, buffer):
            changed.add(slot)
    return changed, [] if as_expected else now


def versions_of(look: Look) -> list[int | None]:
    """The versions of everything in a group."""
    return versions([*look.parameters, *look.wrappers, *look.tensors])


def may_be_written(module: Any, buffer: Any) -> bool:
    """Whether a forward pass of ``module`` may write to its ``buffer`` uncounted.

    In training mode batch normalization writes its running statistics so, and codebooks average themselves through
    ``.data``. Buffers that are packed weights are not written; they are integers, or of one byte. Neither are
    sparse ones, nor the two scalars of each of quanto's layers, which are in training mode after ``quantize``.
    """
    return bool(
        module.training
        and (buffer.is_floating_point() or buffer.is_complex())
        and buffer.element_size() > 1
        and buffer.dim() > 0
        and buffer.layout == sys.modules["torch"].strided
    )


def _is_unchanged(parameter: Any, noted: dict[int, int | None]) -> bool:
    version = version_of(parameter)
    return version is not None and noted.get(id(parameter)) == version
