"""``--part``: together the parts are the whole, and a part is of all kinds of placements."""

from __future__ import annotations

import argparse

import pytest

from tests.pipelines.__main__ import part_of, read_part


def test_together_they_are_the_whole():
    placements = ["a", "b", "c", "d", "e", "f", "g"]
    parts = [part_of(placements, (part, 3), turn=5) for part in (1, 2, 3)]
    assert sorted(one for part in parts for one in part) == placements
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_next_pipeline_has_others():
    assert part_of(["a", "b", "c"], (1, 3), turn=0) != part_of(["a", "b", "c"], (1, 3), turn=1)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0"])
def test_no_part_of_a_whole(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no part of a whole"):
        read_part(text)
