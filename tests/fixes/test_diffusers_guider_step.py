"""diffusers-guider-step: what a guider answers between two runs; each guider, and modular pipelines whole."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import pytest

from tests.fixes.callers import Interrupted
from tests.gate import unmet

torch = pytest.importorskip("torch")
guiders = pytest.importorskip("diffusers.guiders", reason="guiders came with diffusers 0.35")

FIX_ID = "diffusers-guider-step"
SHOWS = "NoneType|num_conditions|KeyError: 'prompt_embeds'"


def kinds():
    """The guiders that combine predictions of no more than two conditions without a configuration of layers."""
    found = {}
    for module in pkgutil.iter_modules(guiders.__path__):
        for value in vars(importlib.import_module(f"diffusers.guiders.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, guiders.guider_utils.BaseGuidance):
                with contextlib.suppress(Exception):  # it needs more than a window
                    value(stop=0.5)
                    found[value.__name__] = value
    return [found[name] for name in sorted(found)]


@pytest.fixture
def run():
    from diffusers_quantfix.verify.models import guiders

    return guiders.run


def conditions(run, window):
    for kind in kinds():
        guider, wanted = kind(**window), kind(**window).num_conditions
        first = run(guider)
        if guider.num_conditions != wanted:
            raise AssertionError(f"num_conditions of {kind.__name__}: {guider.num_conditions}, not {wanted}")
        assert torch.equal(run(guider), first)


@pytest.mark.parametrize("window", [{"stop": 0.5}, {"start": 0.25, "stop": 0.75}], ids=str)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_guidance_that_ends_before_the_run(run, window):
    conditions(run, window)


def test_guidance_that_goes_on_to_the_end(run):
    conditions(run, {})
    conditions(run, {"start": 0.5})


def test_a_step_of_a_run_knows_where_it_is(run):
    """What asks within a step gets the answer for that step."""
    guider = guiders.ClassifierFreeGuidance(guidance_scale=2.0, stop=0.5)
    asked = []

    class Asks(guiders.ClassifierFreeGuidance):
        def forward(self, *args, **kwargs):
            asked.append((self._step, self.num_conditions))
            return super().forward(*args, **kwargs)

    asks = Asks(guidance_scale=2.0, stop=0.5)
    assert torch.equal(run(asks), run(guider))
    assert asked == [(0, 2), (1, 2), (2, 1), (3, 1)]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_run_that_ends_while_predictions_are_combined(run):
    class Ends(guiders.ClassifierFreeGuidance):
        def forward(self, *args, **kwargs):
            if self._step == 3:
                raise Interrupted
            return super().forward(*args, **kwargs)

    guider = Ends(guidance_scale=2.0, stop=0.5)
    with pytest.raises(Interrupted):
        run(guider)
    if guider.num_conditions != 2:
        raise AssertionError(f"num_conditions is {guider.num_conditions} after a run that ended")


WHOLE = ["HeliosPyramidDistilledModularPipeline", "StableDiffusionXLModularPipeline"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_two_runs_of_a_modular_pipeline(tmp_path, name):
    from tests.pipelines import families
    from tests.pipelines.modular import ModularSubject
    from tests.pipelines.subject import PLAIN

    if name not in families.modular():
        pytest.skip("this release has no such pipeline")
    if not unmet("diffusers>=0.36,<0.37"):
        pytest.skip("diffusers 0.36 finds no blocks for it")
    subject = ModularSubject(name, tmp_path)
    pipe = subject.load(PLAIN)
    if "Helios" not in name:
        pipe.update_components(guider=guiders.ClassifierFreeGuidance(guidance_scale=5.0, stop=0.5))
    first = subject.run(pipe)
    for output, expected in zip(subject.run(pipe), first, strict=True):
        assert torch.equal(output, expected)
