"""The table of cells, the edges of claims, and what each declared fix needs of both."""

from __future__ import annotations

import pytest

from tests.upstream import results
from tests.upstream.cells import Cell, fits, read
from tests.upstream.edges import edges, uncovered
from tests.upstream.run_cell import declarations
from tests.upstream.verdict import PATCHED

HEAD = """
python = "3.11"
torch = "2.13.0"
[shared]
wrapt = "2.5.2"
peft = "0.21.2"
[releases]
bitsandbytes = ["0.45.10", "0.45.2", "0.45.3"]
[[range]]
distribution = "bitsandbytes"
shared = ["wrapt"]
"""
ROW = """
[[cell]]
name = "{name}"
ci = {ci}
diffusers = "0.32.2"
transformers = "4.48.3"
accelerate = "1.3.0"
bitsandbytes = "{bitsandbytes}"
"""


def table(tmp_path, *rows, head=HEAD):
    path = tmp_path / "cells.toml"
    path.write_text(head + "".join(rows))
    return read(path)


def row(name, bitsandbytes="0.45.2", ci="false"):
    return ROW.format(name=name, bitsandbytes=bitsandbytes, ci=ci)


def test_a_row_becomes_pins(tmp_path):
    (cell,) = table(tmp_path, row("D04", ci="true")).cells
    assert cell.ci
    assert cell.pins["bitsandbytes"] == "0.45.2"
    assert "torch==2.13.0" in cell.requirements
    assert "peft==0.21.2" in cell.requirements


def test_a_row_overrides_what_is_shared(tmp_path):
    (cell,) = table(tmp_path, row("D04") + 'peft = "0.13.2"\noptimum_quanto = "0.2.7"\n').cells
    assert "peft==0.13.2" in cell.requirements
    assert "optimum-quanto==0.2.7" in cell.requirements
    assert "optimum-quanto 0.2.7" in cell.title


def test_a_row_may_have_a_python_and_a_torch_of_its_own(tmp_path):
    found = table(tmp_path, row("D04"), row("T02") + 'python = "3.12"\ntorch = "2.5.1"\n')
    plain, own = found.cells
    assert (plain.python, own.python) == ("3.11", "3.12")
    assert "torch==2.5.1" in own.requirements and "torch==2.13.0" not in own.requirements
    assert not any("python" in line for line in own.requirements)
    assert own.key != plain.key
    assert (found.pythons, found.torches) == (["3.11", "3.12"], ["2.5.1", "2.13.0"])


def test_a_range_has_one_cell_per_release_in_order(tmp_path):
    cells = table(tmp_path, row("D04")).ranges
    assert [cell.pins["bitsandbytes"] for cell in cells] == ["0.45.2", "0.45.3", "0.45.10"]
    assert all("diffusers" not in cell.pins and cell.alone == "bitsandbytes" for cell in cells)


def test_selection(tmp_path):
    found = table(tmp_path, row("D04", ci="true"), row("D05", "0.45.3"))
    names = lambda *words: [cell.name for cell in found.select(list(words))]  # noqa: E731
    assert names("ci") == ["D04"]
    assert names("D05", "D04") == ["D04", "D05"]
    assert names("all") == [
        "D04",
        "D05",
        "bitsandbytes-0.45.2",
        "bitsandbytes-0.45.3",
        "bitsandbytes-0.45.10",
    ]
    assert names("ranges", "D05") == names("all")[1:]
    with pytest.raises(ValueError, match=r"no cell is called 'D99'.*D04, D05"):
        names("D99")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row("D04"), row("D04")], "two cells are called D04"),
        ([row("D04", "0.45.4")], r"cell D04: bitsandbytes 0.45.4 is not in \[releases\]"),
        (['[[cell]]\nname = "D04"\n'], "the cell D04 does not say its diffusers"),
    ],
)
def test_faults_of_the_table_are_said(tmp_path, rows, says):
    with pytest.raises(ValueError, match=says):
        table(tmp_path, *rows)


def test_equal_pins_share_an_environment_and_others_do_not(tmp_path):
    one, same, other = table(tmp_path, row("D04"), row("X"), row("D05", "0.45.3")).cells
    assert one.key == same.key != other.key
    changed = table(tmp_path, row("D04"), head=HEAD.replace('wrapt = "2.5.2"', 'wrapt = "1.17.0"')).cells[0]
    assert changed.key != one.key


RELEASES = ["0.45.1", "0.45.2", "0.45.3"]


@pytest.mark.parametrize(
    ("specifier", "found"),
    [
        ("<0.45.3", ("0.45.2", "0.45.3")),
        ("<=0.45.2", ("0.45.2", "0.45.3")),
        (">=0.45", ("0.45.3", "")),
        ("", ("0.45.3", "")),
        ("<0.45", ("", "")),
    ],
)
def test_edges_of_a_claim(specifier, found):
    assert edges(specifier, RELEASES) == found


def bare_cell(bitsandbytes, diffusers="0.32.2"):
    return Cell("x", "3.11", {"bitsandbytes": bitsandbytes, "diffusers": diffusers})


def test_an_edge_without_a_cell_is_named():
    known = {"bitsandbytes": RELEASES, "diffusers": ["0.32.2", "0.33.0"]}
    claims = {"bitsandbytes": "<0.45.3"}
    both = [bare_cell("0.45.2"), bare_cell("0.45.3")]
    assert uncovered(claims, "bitsandbytes 0.45.3", known, both) == []
    assert uncovered(claims, "", known, both[:1]) == [
        "no cell has bitsandbytes 0.45.3, the first healthy release,"[:-1]
    ]
    assert "the last affected" in uncovered(claims, "", known, both[1:])[0]
    assert "said to be fixed" in uncovered(claims, "bitsandbytes 0.45.2", known, both)[0]
    # The other half of a claim must fit where an edge is shown.
    elsewhere = [bare_cell("0.45.2", "0.33.0"), bare_cell("0.45.3"), bare_cell("0.45.1")]
    assert (
        "no cell has bitsandbytes 0.45.2"
        in uncovered(claims | {"diffusers": "<0.33"}, "", known, elsewhere)[0]
    )


def test_fits():
    assert fits({"bitsandbytes": "<0.45.3", "diffusers": ""}, bare_cell("0.45.2").pins)
    assert not fits({"accelerate": ""}, bare_cell("0.45.2").pins)


@pytest.mark.parametrize(("fix_id", "said"), declarations().items(), ids=list(declarations()))
def test_the_cells_hold_both_edges_of_every_claim(fix_id, said):
    found = read()
    assert not uncovered(said["claims"], said["fixed_in"], found.known, found.every)


def test_the_set_of_one_ci_run():
    found = read()
    ci = found.select(["ci"])
    assert len(ci) == 8
    for fix_id, by_set in results.load().items():
        # D, T: releases as people had them at one time; what only stands on a set made for it is left to the full run
        patched = {
            name for name, seen in by_set.items() if seen.state == PATCHED and name.startswith(("D", "T"))
        }
        assert not patched or patched & {cell.name for cell in ci}, f"no CI set shows {fix_id}"
    assert len({cell.pins["torch"] for cell in ci}) == 3, "the torch of most sets, and two older ones"
    assert len(found.cells) >= 37
    assert {"2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.12.1", "2.13.0", "2.14.0", "2.15.0"} == set(
        found.torches
    )
    assert found.pythons == ["3.10", "3.11", "3.12", "3.13"]
