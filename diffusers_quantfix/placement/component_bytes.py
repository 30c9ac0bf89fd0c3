"""Counts the bytes of each component repeatedly, and quickly if little has changed."""

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
    """Component -> device -> bytes, without "meta", for repeated counts.

    Each count looks at all tensors, since offload hooks replace them without notice. Between counts only devices,
    addresses and sizes are kept, and no tensor or module is kept alive. If these are unchanged, so are the sums.

    A component of more than `MANY` modules is counted completely only if there is time for it (see `Outline`). Until
    then its sums are an estimate, which the next complete count replaces if nothing has changed in between.

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
        """The present bytes. The dicts are shared between calls: do not modify them.

        Args:
            seconds: the most time that a complete count of a component of more than `MANY` modules may take.
        """
        blocks, ends = Blocks(), []
        # Otherwise each attribute of a tensor subclass takes tens of microseconds.
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
        """The components with at least one sum that is an estimate."""
        return sorted(self._never_exact | self._estimates.keys())

    def settle(self) -> bool:
        """Make estimates exact where nothing has changed since. Returns whether earlier results of `now` changed."""
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
