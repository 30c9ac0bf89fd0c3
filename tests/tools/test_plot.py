"""The picture of `track`: its axes have names and units, and no text lies on what is drawn."""

from __future__ import annotations

import random
import re

import pytest

from diffusers_quantfix.memory.plot import plot
from diffusers_quantfix.memory.samples import Sample

figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws runs into a file; the figure as it was saved."""
    saved = []
    original = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *a, **k: (original(self, *a, **k), saved.append(self))
    )

    def draw(*runs: list[Sample], **options):
        plot({f"run {number}": run for number, run in enumerate(runs)}, tmp_path / "memory.png", **options)
        return saved[-1]

    return draw


def run(steps: int, scale: int, devices: tuple[str, ...] = ("cuda:0", "cpu")) -> list[Sample]:
    chance = random.Random(steps)
    labels = [
        "start",
        *(f"transformer {word}" for _ in range(steps) for word in ("begins", "ends")),
        "moved",
        "end",
    ]
    samples = []
    for number, label in enumerate(labels):
        held = {device: chance.randrange(scale) for device in devices}
        peak = {device: held[device] + chance.randrange(scale) for device in devices}
        samples.append(
            Sample(number, label, held, peak, {"transformer": held, "text_encoder_with_a_long_name": held})
        )
    return samples


@pytest.mark.parametrize(
    ("scale", "unit"), [(100, "B"), (90_000, "kB"), (3_000_000, "MB"), (40_000_000_000, "GB")]
)
def test_the_axes_have_names_and_units(drawn, scale, unit):
    figure = drawn(run(4, scale), run(9, scale))
    assert len(figure.axes) == 4, "one row per device"
    for axes in (figure.axes[0], figure.axes[2]):
        assert re.fullmatch(rf"memory on (cuda:0|cpu) \({unit}\)", axes.get_ylabel())
        low, high = axes.get_ylim()
        assert low == 0 and 0.5 < high < 2200
    for axes in figure.axes[2:]:
        assert axes.get_xlabel() == "component calls in their order, one step per sample"
        assert [label.get_text() for label in axes.get_xticklabels()] == [
            "start",
            "transformer",
            "moved",
            "end",
        ]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} >= {"transformer", "peak within the step"}


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")])
@pytest.mark.parametrize("title", ["", "An 8-bit pipeline: a run, then pipe.to('cpu')"])
def test_no_text_lies_on_a_curve(drawn, devices, title):
    figure = drawn(run(30, 10**9, devices), run(2, 10**9, devices), title=title)
    renderer = figure.canvas.get_renderer()
    areas = [axes.get_window_extent(renderer) for axes in figure.axes]
    texts = [text for axes in figure.axes for text in (*axes.texts, axes._left_title, axes._right_title)]
    texts += [label for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    texts += [label for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label)]
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    assert len(shown) > 10
    for text in shown:
        extent = text.get_window_extent(renderer).padded(-1)
        assert not any(area.overlaps(extent) for area in areas), text.get_text()
