"""What the tools are given wrong, or twice: one clear sentence, and nothing is lost."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("option", ["wait", "search"])
@pytest.mark.parametrize(
    ("value", "error"),
    [("x", TypeError), (None, TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)],
)
def test_seconds_of_release(option, value, error):
    """Before: a traceback after the weights were gone."""
    model = torch.nn.Linear(2, 2)
    for call in (qf.release, qf.releasing):
        with pytest.raises(error, match=f"seconds as {option}, not"):
            call(model, **{option: value})
    assert model(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(("value", "error"), [("x", TypeError), (True, TypeError), (-1, ValueError)])
def test_the_interval_of_track(value, error):
    with pytest.raises(error, match="interval"):
        qf.track(torch.nn.Linear(2, 2), interval=value)


def test_a_second_block():
    """Before: the second one saw nothing, and its report replaced the first one's."""
    model = torch.nn.Linear(2, 2)
    memory = qf.track(model)
    with memory:
        model(torch.ones(1, 2))
    table = memory.table()
    with pytest.raises(RuntimeError, match="call it again"), memory:
        raise AssertionError
    assert memory.table() == table
    handle = qf.releasing(model)
    with handle:
        model(torch.ones(1, 2))
    report = handle.report
    assert report is not None and report.released
    with pytest.raises(RuntimeError, match="make a new one"), handle:
        raise AssertionError
    assert handle.report is report


def test_a_shallow_copy_of_a_layer_keeps_the_weights():
    """Before: AttributeError "has no attribute 'weight'"."""
    import copy

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval()
    copies = [copy.copy(layer) for layer in model]
    expected = model(torch.ones(1, 2))
    report = qf.release(model)
    assert torch.equal(copies[1](copies[0](torch.ones(1, 2))), expected)
    assert report.survivors, "the copies keep the memory"
