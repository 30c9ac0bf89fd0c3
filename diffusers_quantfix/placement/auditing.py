"""`audit`: the device of every tensor of a pipeline or model, and which tensors are misplaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..text import human
from ..torch_modes import unobserved
from .components import components_of, is_module, readable_name
from .report import Audit, Misplaced, TensorRecord

if TYPE_CHECKING:
    from .checks import Examined

__all__ = ["audit"]


@unobserved
def audit(model_or_pipe: Any) -> Audit:
    """Find every tensor of a model or pipeline: parameters, buffers, and tensors that torch does not list.

    These are: quant states of bitsandbytes 4-bit layers with their nested states, CB and SCB of 8-bit layers before and
    after their first forward pass, the inner tensors of optimum-quanto and torchao weights, weights that offload hooks
    keep in memory, the packed weights that are kept while a LoRA is merged, gradients, and tensors that are plain
    attributes of a module. Nothing is moved or loaded.

    A tensor is misplaced if it is a companion on another device than its weight; if it is on another device than the
    rest of its component, unless a device map or offloading put it there; or if it is on ``meta`` and no offload hook
    will fill it.

    Args:
        model_or_pipe: a diffusers pipeline (also a modular one, or one with components that are None), a
            ``torch.nn.Module``, or a dict of components.

    Returns:
        The audit: ``print`` it, read ``.ok`` and ``.misplaced``, or call ``.raise_if_misplaced()``.

    Raises:
        TypeError: ``model_or_pipe`` is none of these.
    """
    from .released import released_message

    components = components_of(model_or_pipe, "audit")
    records: list[TensorRecord] = []
    misplaced: list[Misplaced] = []
    offload: dict[str, str] = {}
    notes: list[str] = []
    released = {name: released_message(value) for name, value in components.items()}
    notes += dict.fromkeys(filter(None, (released_message(model_or_pipe) or None, *released.values())))
    if released_message(model_or_pipe):
        notes = notes[:1]
    examined = _examined({name: value for name, value in components.items() if not released[name]}, notes)
    for component, found in examined:
        records += found.records
        misplaced += found.misplaced
        if found.offload:
            offload[component] = found.offload
    notes += _spread_note(components, records, offload)
    notes += _merged_note(records)
    present = {record.component for record in records}
    return Audit(
        subject=readable_name(model_or_pipe),
        components={
            name: type(value).__name__ if value is not None else "None"
            for name, value in components.items()
            if value is None or is_module(value) or name in present
        },
        tensors=tuple(records),
        misplaced=tuple(misplaced),
        offload=offload,
        notes=tuple(notes),
    )


def _examined(components: dict[str, Any], notes: list[str]) -> Iterator[tuple[str, Examined]]:
    # Without torch there are no tensors.
    if "torch" not in sys.modules:
        return
    from .checks import examine
    from .counting import Blocks
    from .tensors import held_tensors
    from .views import kept_by_views

    held = {name: list(held_tensors(name, value)) for name, value in components.items() if value is not None}
    blocks = Blocks()
    for part in held.values():
        blocks.extend([one.tensor for one in part])
    sizes = blocks.added()
    notes += kept_by_views([one for part in held.values() for one in part], sizes)
    first = 0
    for component, part in held.items():
        yield component, examine(components[component], part, sizes[first : first + len(part)])
        first += len(part)


def _merged_note(records: list[TensorRecord]) -> list[str]:
    """A note on the packed weights from before a merge, which take memory besides the model."""
    kept = sum(record.bytes for record in records if record.kind == "before merge")
    if not kept:
        return []
    return [
        f"{human(kept)} are the packed weights from before an adapter was merged, kept until it is unmerged "
        "(unfuse_lora, unmerge_adapter) or unloaded"
    ]


def _spread_note(
    components: dict[str, Any], records: list[TensorRecord], offload: dict[str, str]
) -> list[str]:
    """A note if components are each on one device, but on different ones: intended, or a move that failed midway."""
    where: dict[str, set[str]] = {}
    for record in records:
        if (
            record.kind in ("weight", "buffer")
            and record.device != "meta"
            and record.component not in offload
        ):
            where.setdefault(record.component, set()).add(record.device)
    whole = {component: next(iter(devices)) for component, devices in where.items() if len(devices) == 1}
    if offload or len(set(whole.values())) < 2:
        return []
    by_device: dict[str, list[str]] = {}
    for component, device in whole.items():
        by_device.setdefault(device, []).append(component)
    parts = "; ".join(f"{device}: {', '.join(names)}" for device, names in sorted(by_device.items()))
    return [f"components are on different devices: {parts}"]
