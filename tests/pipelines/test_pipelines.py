"""Every pipeline of the newest release is known: it runs here, or is listed with its reason; the page is up to date.

Every outcome is exact, or listed as a refusal or as open; so a bug that is cured and its rows, which are older than the
cure, do not stand beside each other: who takes it off the list runs them again.

Nothing is run here: ``python -m tests.pipelines`` runs all, with ``--families --slice`` what CI has a step for.
"""

from __future__ import annotations

import re

import pytest

from tests.gate import unmet
from tests.pipelines import results, table
from tests.pipelines.families import (
    BEFORE,
    NOT_BUILT,
    OPEN,
    OPTIONAL,
    PLACEHOLDERS,
    REFUSALS,
    every,
    placeholders,
    without_group_offload,
)


def outcomes_of(found):
    """Each outcome of a file with its pipeline, backend and placement."""
    return [
        (name, backend, placement, said)
        for name, backends in found["outcomes"].items()
        for backend, outcomes in backends.items()
        for placement, said in outcomes.items()
    ]


FOUND = results.read(results.FILE)
OUTCOMES = outcomes_of(FOUND)
pytestmark = pytest.mark.skipif(
    bool(unmet(f"diffusers=={FOUND['versions']['diffusers']}")), reason="the results are of another release"
)


def test_every_pipeline_of_the_release_is_known():
    """A new pipeline is to be run (``python -m tests.pipelines --family NAME --json ...``) or to be listed."""
    unknown = {*every(), *OPTIONAL} - set(FOUND["outcomes"]) - set(NOT_BUILT)
    assert not unknown, "neither run nor listed in NOT_BUILT: " + ", ".join(sorted(unknown))
    gone = set(NOT_BUILT) - set(every())
    assert not gone, "listed, but not in this release: " + ", ".join(sorted(gone))


def test_the_page_and_the_readme():
    assert table.main(["--check"]) == 0, "python -m tests.pipelines.table --write"
    assert f"`PIPELINES.md` ({table.brief(FOUND)})" in table.README.read_text(encoding="utf-8")


def test_every_outcome_is_exact_refused_or_open():
    seen: set = set()
    unknown = []
    for name, backend, placement, said in OUTCOMES:
        if said == results.EXACT:
            continue
        refusals = [one for one in REFUSALS if re.match("upstream: " + one, said)]
        known = [one for one in OPEN if re.match(one[0], name) and re.search(one[1], placement)]
        seen.update(refusals or known)
        if not refusals and not known:
            unknown.append(f"{name}, {backend}, {placement}: {said[:100]}")
    assert not unknown, f"cure it, run it again with --again, or list it in OPEN: {unknown}"
    assert {*REFUSALS, *OPEN} == seen, "what is cured is on no list"


def test_every_outcome_of_an_older_release_is_exact_refused_or_known():
    seen: set = set()
    unknown = []
    for label in results.OLDER:
        for name, backend, placement, said in outcomes_of(results.read(results.older(label))):
            if said == results.EXACT or any(re.match("upstream: " + one, said) for one in REFUSALS):
                continue
            known = [one for one in BEFORE if re.fullmatch(one[0], name) and re.match(one[1], said)]
            seen.update(known)
            if not known:
                unknown.append(f"{label}, {name}, {backend}, {placement}: {said[:100]}")
    assert not unknown, f"cure it, run it again with --again, or list it in BEFORE: {unknown}"
    assert set(BEFORE) == seen, "what is cured is on no list"


def test_the_releases_of_each_outcome_are_recorded():
    """The set's, or those that ``also_with`` names, which are others than the set's."""
    known = {(name, backend, placement) for name, backend, placement, _ in OUTCOMES}
    for text, pipelines in FOUND.get("also_with", {}).items():
        others = dict(one.split(" ") for one in text.split(", "))
        assert others
        for library, release in others.items():
            assert FOUND["versions"].get(library) != release
        named = {
            (name, backend, placement)
            for name, backends in pipelines.items()
            for backend, placements in backends.items()
            for placement in placements
        }
        assert named <= known


def test_what_a_run_records():
    found = {"versions": {**results.versions(), "torch": "0"}, "outcomes": {}}
    results.record(found, "Some", "plain", {"to": "exact", "sequential": "exact"})
    [(others, rows)] = found["also_with"].items()
    assert others.startswith("torch ")
    assert rows == {"Some": {"plain": ["sequential", "to"]}}
    found["versions"] = results.versions()
    results.record(found, "Some", "plain", {"to": "exact"})
    assert found["also_with"] == {others: {"Some": {"plain": ["sequential"]}}}
    results.record(found, "Some", "plain", {"sequential": "exact"})
    assert found["also_with"] == {}


def test_placeholders_are_listed():
    missing = placeholders()
    assert missing.keys() <= PLACEHOLDERS.keys()
    for name, packages in missing.items():
        assert PLACEHOLDERS[name] in packages


def test_no_model_refuses_group_offload():
    assert not without_group_offload()
