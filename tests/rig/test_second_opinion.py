"""torch's stream sanitizer and the rig's late devices agree wherever both can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.gate import unmet
from tests.rig.fixtures import require_rig
from tests.trees import ROOT

pytest.importorskip("torch")

PROGRAM = """
from tests import rig

assert rig.load(), rig.unavailable_reason()
import json

from tests.rig import second_opinion

print(json.dumps(second_opinion.reports()))
"""
# What the sanitizer does not follow: reads and writes of the host, memory that is used again or freed, other threads.
UNSEEN = {
    "test_an_early_host_read",
    "test_an_early_host_read_without_an_operator[<lambda>]",
    "test_an_early_host_write",
    "test_a_changed_source",
    "test_reuse",
    "test_reuse_with_another_stream_recorded",
    "test_an_early_free",
    "test_a_race_in_another_thread",
}
# An operator that consists of others: newer releases do not see them.
DEPENDS_ON_THE_RELEASE = {"test_a_race_in[inference_mode]"}
RACES = {
    "test_a_race",
    "test_a_race_of_bytes",
    "test_a_race_the_other_way",
    "test_a_race_in_a_backward_pass",
    "test_a_race_in[no_grad]",
    "test_an_event_before_the_copy_is_not_enough",
    "test_the_default_stream_does_not_wait_by_itself",
}
# Before torch 2.8 it takes a view for a read.
FALSE_ALARMS = {"test_parts_of_one_memory", "test_views_read_nothing"} if unmet("torch>=2.8") else set()


@pytest.mark.long
def test_both_agree():
    require_rig()
    environment = {**os.environ, "DIFFUSERS_QUANTFIX": "off"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert {
        name for name, (theirs, ours) in found.items() if theirs and ours
    } - DEPENDS_ON_THE_RELEASE == RACES
    assert {
        name for name, (theirs, ours) in found.items() if ours and not theirs
    } - DEPENDS_ON_THE_RELEASE == UNSEEN
    assert {name for name, (theirs, ours) in found.items() if theirs and not ours} <= FALSE_ALARMS
    assert sum(1 for counts in found.values() if counts == [0, 0]) >= 17, "healthy programs"
