"""`track` of long runs: bounded memory, bounded cost, and no peak lost."""

from __future__ import annotations

import itertools

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory.samples import Recording, Sample, halved, peak_of


def _sample(index: int, label: str, device: int, cpu: int = 1, peak: int = 0) -> Sample:
    held = {"cuda:0": device, "cpu": cpu}
    return Sample(float(index), label, held, {**held, "cuda:0": max(device, peak)}, {"unet": held})


def _calls(count: int) -> list[Sample]:
    return [
        _sample(i, f"unet {'ends' if i % 2 else 'begins'}", (i * 7919) % 1000, peak=(i * 104729) % 5000)
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [10, 100, 101, 3000, 20_001])
def test_a_recording_is_bounded_and_keeps_peaks_and_marks(count):
    recording = Recording(100)
    recording.add(_sample(-1, "start", 5))
    made = _calls(count)
    for index, sample in enumerate(made):
        recording.add(sample)
        assert len(recording.samples) <= 100
        if index == count // 2:
            recording.add(_sample(index, "moved", 1))
    recording.add(_sample(count, "end", 3))
    kept = recording.samples
    assert [sample.label for sample in kept if "unet" not in sample.label] == ["start", "moved", "end"]
    assert peak_of(kept)["cuda:0"] == peak_of(made)["cuda:0"]
    most = max(sample.components["unet"]["cuda:0"] for sample in made)
    assert max(sample.components["unet"]["cuda:0"] for sample in kept) == most
    assert [sample.seconds for sample in kept] == sorted(sample.seconds for sample in kept)


def test_samples_of_a_long_recording_stand_for_about_equally_many():
    recording = Recording(100)
    for sample in _calls(10_000):
        recording.add(sample)
    seconds = [sample.seconds for sample in recording.samples]
    gaps = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    assert max(gaps) <= 4 * (10_000 / len(seconds))


def test_marks_are_merged_only_when_they_are_too_many():
    recording = Recording(100)
    for index in range(1000):
        recording.add(_sample(index, f"mark {index}", index))
    assert len(recording.samples) <= 100
    assert recording.samples[0].label == "mark 0"
    assert recording.samples[-1].label == "mark 999"


def test_halving_does_not_merge_the_ends():
    assert halved([]) == []
    for count in range(1, 12):
        samples = _calls(count)
        shorter = halved(samples)
        assert shorter[0] is samples[0]
        assert shorter[-1] is samples[-1]
        assert len(shorter) <= max(3, count // 2 + 2)


def _tiny():
    import torch

    return torch.nn.Linear(4, 4), torch.ones(1, 4)


def test_short_calls_are_not_all_sampled_and_the_first_are():
    model, x = _tiny()
    with qf.track(model) as memory:
        for _ in range(3000):
            model(x)
    labels = [sample.label for sample in memory.samples]
    assert labels[:3] == ["start", "Linear begins", "Linear ends"]
    # How many follow depends on how long a sample takes here; none is of another kind or out of turn.
    assert labels[-1] == "end" and set(labels[1:-1:2]) == {"Linear begins"}
    assert memory.left_out > 1000
    assert memory.left_out + len(memory.samples) <= 6002
    assert str(memory.left_out) in memory.table()
    assert max(map(len, memory.table().splitlines())) <= 80


def test_short_calls_have_one_hook_and_a_failing_one_keeps_its_error():
    model, x = _tiny()
    with qf.track(model) as memory:
        for _ in range(100):
            model(x)
        assert not model._forward_hooks
        assert len(model._forward_pre_hooks) == 1
        for _ in range(2):
            with pytest.raises(TypeError, match="linear"):
                model("no tensor")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert memory.left_out + len(memory.samples) == 2 + 2 * 102


def test_long_calls_after_short_ones_are_sampled_at_both_ends():
    import time

    import torch

    class Slow(torch.nn.Linear):
        seconds = 0.0

        def forward(self, x):
            time.sleep(self.seconds)
            return super().forward(x)

    model, x = Slow(4, 4), torch.ones(1, 4)
    with qf.track(model) as memory:
        for _ in range(100):
            model(x)
        assert not model._forward_hooks
        model.seconds = 0.03
        for _ in range(4):
            model(x)
    assert [sample.label for sample in memory.samples[-3:]] == ["Slow begins", "Slow ends", "end"]


def test_the_interval_is_the_callers(monkeypatch):
    import time

    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    model, x = _tiny()
    for interval, expected in ((0, 22), (1.0, 12), (3.5, 4), (1e9, 2)):
        with qf.track(model, interval=interval) as memory:
            for _ in range(10):
                now[0] += 1.0
                model(x)
        assert len(memory.samples) == expected, interval
        assert memory.left_out == 22 - expected


def test_a_model_whose_samples_are_slow_is_sampled_less_from_the_first_on(monkeypatch):
    from diffusers_quantfix.memory import tracking

    monkeypatch.setattr(tracking, "_SLOW", 0.0)
    model, x = _tiny()
    with qf.track(model) as memory:
        model(x)
    assert [sample.label for sample in memory.samples] == ["start", "end"]
    assert memory.left_out == 2


def test_ten_thousand_calls_are_bounded():
    model, x = _tiny()
    with qf.track(model, interval=0) as memory:
        for _ in range(10_000):
            model(x)
    assert len(memory.samples) <= 1000
    assert memory.left_out == 0
    assert memory.peak == qf.audit(model).bytes


def test_a_picture_of_a_long_run_is_drawn_from_few_samples_with_all_peaks(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from diffusers_quantfix.memory import plot

    samples = [_sample(-1, "start", 5), *_calls(20_000), *(_sample(0, f"mark {n}", 1) for n in range(2000))]
    thinned = plot._thinned(samples)
    assert len(thinned) <= 600
    assert peak_of(thinned) == peak_of(samples)
    plot.plot({"a long run": samples, "nothing": []}, tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 1000


@pytest.mark.parametrize("interval", [-1, float("nan")])
def test_a_negative_interval_is_refused(interval):
    with pytest.raises(ValueError, match="interval of 0 or more seconds"):
        qf.track(_tiny()[0], interval=interval)
