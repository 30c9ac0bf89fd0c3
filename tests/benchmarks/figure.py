"""A figure: what is measured, what came out, and what it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        what: what was measured, for people.
        value: the ratio, count or time.
        unit: "x" for a ratio, "us", "s", "bytes", "%" or "" for a count.
        goal: the most (or, for a count that has to be hit, the very) value that is wanted; None for a peer.
        exact: the value has to be the goal, not below it.
        detail: the two absolute figures behind a ratio, or why nothing was measured.
        noise: how far the values of several measurements are apart; None for one.
        failed: it should have been measured and was not: ``detail`` says what failed, or that time ran out.
        figure: the name of the figure that it belongs to.
    """

    what: str
    value: float | None
    unit: str = "x"
    goal: float | None = None
    exact: bool = False
    detail: str = ""
    noise: float | None = None
    failed: bool = False
    figure: str = ""

    @property
    def verdict(self) -> str:
        """ "yes", "no", or "" where there is no goal or no value."""
        if self.goal is None or self.value is None:
            return ""
        if self.exact:
            return "yes" if abs(self.value - self.goal) <= 1e-9 + 0.005 * abs(self.goal) else "no"
        return "yes" if self.value <= self.goal else "no"


FIGURES: dict[str, Callable[[], Iterator[Row]]] = {}


def figure(name: str) -> Callable[[Callable[[], Iterator[Row]]], Callable[[], Iterator[Row]]]:
    """Declare a figure under the name by which it is selected."""

    def declare(measure: Callable[[], Iterator[Row]]) -> Callable[[], Iterator[Row]]:
        FIGURES[name] = measure
        return measure

    return declare
