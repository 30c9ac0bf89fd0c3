"""The committed counts: how they are kept and told, and that they are of the pinned releases."""

from __future__ import annotations

from tests.peers import results
from tests.peers.__main__ import PLACES, SETS
from tests.peers.compare import Comparison
from tests.peers.sources import LIBRARIES
from tests.upstream import tables
from tests.upstream.cells import read


def test_a_run_is_one_line_and_is_read_as_it_was_written(tmp_path) -> None:
    found = Comparison({"skipped": 2, "passed": 3}, {"a": "reason"}, {"b": "why", "c": "why"})
    row = results.row("1.2.0", "2026-11-22", found, ["d"])
    assert row == {"release": "1.2.0", "date": "2026-11-22", "same": {"passed": 3, "skipped": 2}, "intended": 1,
                   "unsteady": 1, "different": 2}  # fmt: skip
    assert results.load(tmp_path / "none.json") == {}
    results.save({"D14 accelerate rig": row, "D14 accelerate cpu": row}, tmp_path / "some.json")
    assert results.load(tmp_path / "some.json") == {"D14 accelerate cpu": row, "D14 accelerate rig": row}
    assert len((tmp_path / "some.json").read_text().splitlines()) == 4


def test_the_page_tells_the_sums_of_each_library() -> None:
    def row(release, different=0, **same):
        found = Comparison(same, {}, dict.fromkeys(range(different), "why"))
        return results.row(release, "2026-11-22", found, [])

    found = {
        "D04 one cpu": row("1.10.0", passed=3, failed=1),
        "D04 one rig": row("1.10.0", passed=4, died=1, skipped=2),
        "D14 one rig": row("1.9.0", passed=1),
        "D14 two cpu": row("3.0", different=2, passed=1),
    }
    page = tables.compatibility_page({}, {}, read(), found).splitlines()
    said = [line for line in page if "on both sides" in line]
    assert said == [
        "- one 1.9.0, 1.10.0, 3 runs: 8 pass, 2 fail and 2 are skipped on both sides; none end otherwise with it",
        "- two 3.0, 1 run: 1 pass, 0 fail and 0 are skipped on both sides; 2 end otherwise with it",
    ]
    assert any(line.startswith("D04, D14, without the package and with it") for line in page)


def test_the_committed_counts_are_those_of_the_pinned_releases_and_nothing_differs() -> None:
    pinned = {
        f"{cell.name} {library} {place}": cell.pins[library]
        for cell in read().select(list(SETS))
        for library in LIBRARIES
        for place in PLACES
    }
    found = results.load()
    assert {name: said["release"] for name, said in found.items()}.items() <= pinned.items()
    assert {name.split()[1] for name in found} == set(LIBRARIES)
    assert not [name for name, said in found.items() if said["different"] or not said["same"].get("passed")]
