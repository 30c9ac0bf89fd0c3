"""Every pipeline of the newest release is known: it runs here, or is listed with its reason; the page is up to date.

Nothing is run here: ``python -m tests.pipelines`` runs all, with ``--families`` a slice that CI has a step for.
"""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.pipelines import results, table
from tests.pipelines.families import NOT_BUILT, pipelines

FOUND = results.read(results.FILE)
pytestmark = pytest.mark.skipif(
    bool(unmet(f"diffusers=={FOUND['versions']['diffusers']}")), reason="the results are of another release"
)


def test_every_pipeline_of_the_release_is_known():
    """A new pipeline is to be run (``python -m tests.pipelines --family NAME --json ...``) or to be listed."""
    unknown = set(pipelines()) - set(FOUND["outcomes"]) - set(NOT_BUILT)
    assert not unknown, "neither run nor listed in NOT_BUILT: " + ", ".join(sorted(unknown))
    gone = set(NOT_BUILT) - set(pipelines())
    assert not gone, "listed, but not in this release: " + ", ".join(sorted(gone))


def test_the_page():
    assert table.PAGE.read_text() == table.page(FOUND), "python -m tests.pipelines.table --write"


def test_the_readme_says_how_many():
    ran = {
        name
        for name, backends in FOUND["outcomes"].items()
        for backend, outcomes in backends.items()
        if backend == "bnb-nf4" and table.is_run(outcomes)
    }
    assert f"({len(ran)} pipelines in 4 bits)" in (table.PAGE.parents[1] / "README.md").read_text(
        encoding="utf-8"
    )
