"""The defect of peft-unmerge-road."""

from __future__ import annotations

import pytest

FIX_ID = "peft-unmerge-road"
# What upstream says without the fix, as a regular expression.
SHOWS = "FILL IN: the error text"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_a_user_does():
    """FILL IN: do what a user does and assert what is right; it must fail with SHOWS on ``--side bare``."""
    pytest.fail("a stub; FILL IN tests/fixes/test_peft_unmerge_road.py")
