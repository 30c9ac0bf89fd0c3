"""Every pipeline of the newest release is known: it runs here, or is listed with its reason; the page is up to date.

Nothing is run here: ``python -m tests.pipelines`` runs all, with ``--families --slice`` what CI has a step for.
"""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.pipelines import results, table
from tests.pipelines.families import NOT_BUILT, every

FOUND = results.read(results.FILE)
pytestmark = pytest.mark.skipif(
    bool(unmet(f"diffusers=={FOUND['versions']['diffusers']}")), reason="the results are of another release"
)


def test_every_pipeline_of_the_release_is_known():
    """A new pipeline is to be run (``python -m tests.pipelines --family NAME --json ...``) or to be listed."""
    unknown = set(every()) - set(FOUND["outcomes"]) - set(NOT_BUILT)
    assert not unknown, "neither run nor listed in NOT_BUILT: " + ", ".join(sorted(unknown))
    gone = set(NOT_BUILT) - set(every())
    assert not gone, "listed, but not in this release: " + ", ".join(sorted(gone))


def test_the_page_and_the_readme():
    assert table.main(["--check"]) == 0, "python -m tests.pipelines.table --write"
    assert f"`PIPELINES.md` ({table.brief(FOUND)})" in table.README.read_text(encoding="utf-8")
