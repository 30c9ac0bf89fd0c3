"""What a step of a pipeline comes to: ``exact``, a difference, or an error in one line."""

from __future__ import annotations

from collections.abc import Callable

from tests.pipelines.forked import line

EXACT = "exact"


def outcome(function: Callable[[], str]) -> str:
    """What a function returns, or its error in one line."""
    try:
        return function()
    except Exception as error:
        return line(error)


def compare(outputs: list, expected: list) -> str:
    import torch

    if len(outputs) != len(expected):
        return f"differs: {len(outputs)} outputs instead of {len(expected)}"
    worst = 0.0
    for one, other in zip(outputs, expected, strict=True):
        if one.shape != other.shape:
            return f"differs: shape {tuple(one.shape)} instead of {tuple(other.shape)}"
        if not torch.equal(one, other):
            worst = max(worst, float((one.double() - other.double()).abs().max()))
            if worst != worst or worst == 0:
                return "differs: not a number"
    return EXACT if worst == 0 else f"differs by {worst:.3g}"
