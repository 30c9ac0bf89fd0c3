"""Draws the samples of `track`: the memory used on each device by each component, and the peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..placement.components import accelerators_first
from ..text import human
from .samples import caller_of, halved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .samples import Sample

__all__ = ["plot"]

_COLOURS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#997700", "#000000")
_OTHER = "#bbbbbb"
_PEAK = "#cc3311"
_MOST_LABELS = 16
# More steps than this cannot be told apart in a picture.
_MOST_STEPS = 600
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def plot(
    runs: Mapping[str, Sequence[Sample]], path: Any, title: str = "", devices: Sequence[str] = ()
) -> None:
    """Draw runs side by side into an image file, with one row per device and the same scale for all runs.

    Long runs are thinned; their peaks are kept.

    Args:
        runs: title of each run -> its samples.
        path: the file to write; the suffix chooses the format.
        title: the title above all runs.
        devices: the rows; by default every device that was used, accelerators first.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no samples.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install 'diffusers-quantfix[plot]'") from error

    if not any(runs.values()):
        raise ValueError(
            "there is nothing to draw: no memory was sampled; use track() as a context manager first"
        )
    runs = {name: _thinned(samples) for name, samples in runs.items()}
    rows = list(devices) or _devices(runs)
    names = list(dict.fromkeys(name for run in runs.values() for sample in run for name in sample.components))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    # Without pyplot: needs no window system, and does not touch the caller's figures.
    figure = Figure(figsize=(1.5 + 6.0 * len(runs), 2.0 + 2.6 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(runs), squeeze=False, sharey="row", sharex="col")
    for row, device in enumerate(rows):
        top = max((sample.peak.get(device, 0) for run in runs.values() for sample in run), default=0)
        scale, unit = next(((scale, unit) for scale, unit in _UNITS if top >= scale), _UNITS[-1])
        for column, (name, samples) in enumerate(runs.items()):
            axes = grid[row][column]
            if samples:
                _draw(axes, samples, device, colours, scale)
            axes.set_ylim(0, (top / scale or 1.0) * 1.05)
            if row == 0:
                axes.set_title(name, fontsize=11, loc="left")
            # Above the axes: inside, it could overlap a curve.
            at_the_end = human(samples[-1].allocated.get(device, 0)) if samples else "nothing sampled"
            axes.set_title(f"{at_the_end} at the end", fontsize=11, loc="right", weight="bold")
            if column == 0:
                axes.set_ylabel(f"memory on {device} ({unit})")
    for column, samples in enumerate(runs.values()):
        _label(grid[-1][column], samples)
        grid[-1][column].set_xlabel("component calls in their order, one step per sample")
    handles, labels = _legend(grid)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4 * len(runs), len(labels)),
        frameon=False,
        fontsize=9,
    )
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, ha="left", weight="bold")
    figure.savefig(path)


def _draw(axes: Any, samples: Sequence[Sample], device: str, colours: dict[str, str], scale: float) -> None:
    # A value holds until the next sample.
    edges = list(range(len(samples) + 1))
    floor = [0.0] * len(samples)
    for name, colour in colours.items():
        own = [sample.components.get(name, {}).get(device, 0) / scale for sample in samples]
        if any(own):
            above = [low + high for low, high in zip(floor, own, strict=True)]
            axes.stairs(above, edges, baseline=floor, fill=True, color=colour, label=name)
            floor = above
    total = [
        max(low, sample.allocated.get(device, 0) / scale) for low, sample in zip(floor, samples, strict=True)
    ]
    if any(high > low for low, high in zip(floor, total, strict=True)):
        axes.stairs(total, edges, baseline=floor, fill=True, color=_OTHER, label="activations and all else")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, len(samples))
    if device == "cpu":
        return
    # The peak was reached before the sample that reports it: it belongs to the step that ends there.
    peaks = [sample.peak.get(device, 0) / scale for sample in samples]
    peaks = [*peaks[1:], total[-1]]
    axes.stairs(peaks, edges, baseline=total, fill=True, color=_PEAK, alpha=0.12)
    axes.stairs(peaks, edges, baseline=None, color=_PEAK, linewidth=1.4, label="peak within the step")


def _label(axes: Any, samples: Sequence[Sample]) -> None:
    """Label each run of calls of one component at its middle, and all other samples at their position."""
    named: list[tuple[float, str]] = []
    first, previous = 0, ""
    for index, sample in enumerate([*samples, None]):
        caller = caller_of(sample.label) if sample else ""
        if previous and caller != previous:
            named.append(((first + index - 1) / 2, previous))
        if caller and caller != previous:
            first = index
        if sample and not caller:
            named.append((index, sample.label))
        previous = caller
    every = max(1, -(-len(named) // _MOST_LABELS))
    named = [item for index, item in enumerate(named) if index % every == 0 or index == len(named) - 1]
    axes.set_xticks(
        [x for x, _ in named],
        [label for _, label in named],
        rotation=35,
        ha="right",
        rotation_mode="anchor",
        fontsize=9,
    )


def _legend(grid: Any) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    while len(samples) > _MOST_STEPS:
        samples = halved(samples)
    return samples


def _devices(runs: Mapping[str, Sequence[Sample]]) -> list[str]:
    used = {
        d
        for run in runs.values()
        for sample in run
        for d, count in sample.peak.items()
        if count and d != "meta"
    }
    return sorted(used, key=accelerators_first) or ["cpu"]
