"""Counts the bytes of each component again and again, in little time where little changes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from .counting import Blocks
from .modules import modules_of
from .outline import MANY, Outline
from .tensors import tensors_of

__all__ = ["ComponentBytes"]


class ComponentBytes:
    """Component -> device -> bytes without "meta", asked for again and again.

    Each time all tensors are looked at, since offload hooks exchange them without telling anyone. From one time to the
    next only the devices, addresses and sizes are kept, no tensor and no module, so that nothing is kept alive. Where
    they are all as they were, so are the sums.

    A component of more than `MANY` modules is looked at completely only where the time suffices, see `Outline`. Until
    then its sums are an estimate, which the next complete look replaces if nothing changed in between.

    Args:
        components: name -> module.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        self._components = {name: weakref.ref(component) for name, component in components.items()}
        self._outlines = {
            name: Outline() for name, component in components.items() if len(modules_of(component)) > MANY
        }
        self._known: tuple[list[int], Blocks] | None = None
        self._sums: dict[str, dict[str, int]] = {}
        self._estimates: dict[str, list[dict[str, int]]] = {}
        self._never_exact: set[str] = set()

    def now(self, seconds: float = math.inf) -> dict[str, dict[str, int]]:
        """The bytes as they are now. The dicts are shared between calls: they are to be read only.

        Args:
            seconds: a component of very many modules is looked at completely if that takes no longer.
        """
        blocks, ends = Blocks(), []
        # A tensor subclass needs tens of microseconds for every attribute otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            for name, component in self._components.items():
                module = component()
                if module is not None and (outline := self._outlines.get(name)) is not None:
                    if not outline.look(module, seconds) and name in self._estimates:
                        del self._estimates[name]
                        self._never_exact.add(name)
                    blocks.append(outline.blocks)
                elif module is not None:
                    blocks.extend(tensors_of(modules_of(module)))
                ends.append(len(blocks))
        if (ends, blocks) != self._known:
            self._known = ends, blocks
            self._sums = _sums(dict(zip(self._components, ends, strict=True)), blocks)
            for name, outline in self._outlines.items():
                self._settle(name, outline)
        return self._sums

    @property
    def estimated(self) -> list[str]:
        """Components of which at least one sum is an estimate."""
        return sorted(self._never_exact | self._estimates.keys())

    def settle(self) -> bool:
        """Make estimates exact where nothing changed since. Whether that changed what `now` returned earlier."""
        with torch._C.DisableTorchFunctionSubclass():
            found = any(self._outlines[name].unchanged() for name in self._estimates)
        if found:
            self.now()
        return found

    def _settle(self, name: str, outline: Outline) -> None:
        counts = self._sums[name]
        if outline.exact:
            for estimate in self._estimates.pop(name, ()):
                estimate.clear()
                estimate.update(counts)
        else:
            for device in counts:
                counts[device] = round(counts[device] * outline.share)
            self._estimates.setdefault(name, []).append(counts)


def _sums(ends: Mapping[str, int], blocks: Blocks) -> dict[str, dict[str, int]]:
    added = blocks.added()
    sums: dict[str, dict[str, int]] = {}
    first = 0
    for name, end in ends.items():
        counts = dict.fromkeys(blocks.devices[first:end], 0)
        if len(counts) == 1:
            counts = dict.fromkeys(counts, sum(added[first:end]))
        else:
            for device, count in zip(blocks.devices[first:end], added[first:end], strict=True):
                counts[device] += count
        sums[name] = {str(device): count for device, count in counts.items() if device.type != "meta"}
        first = end
    return sums
