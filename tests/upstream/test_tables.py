"""The generated pages and the committed results: how they are made, what makes them stale, that they are up to date."""

from __future__ import annotations

import pytest
from packaging.version import Version

from diffusers_quantfix.advisories import supported
from tests.upstream import results, tables
from tests.upstream.cells import read
from tests.upstream.run_cell import declarations
from tests.upstream.verdict import APPLIED, HEALTHY, NOT_APPLICABLE, PATCHED

SAID = {"a-fix": {"claims": {"bitsandbytes": ">=0.43.0,<0.45.3"}, "fixed_in": "bitsandbytes 0.45.3", "module": "m",
                  "title": "t", "symptom": "RuntimeError: a | b", "upstream":
                  ["https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1527"]}}  # fmt: skip


def ran(cell, state=PATCHED, **more):
    return {"cell": cell.name, "pins": cell.pins, "date": "2026-11-21", "failures": [],
            "fixes": {"a-fix": {"state": state}}, **more}  # fmt: skip


def signs(text, fix_id="a-fix"):
    row = next(line for line in text.splitlines() if line.startswith(f"| {fix_id} |"))
    return [sign.strip() for sign in row.split("|")[2:-1]]


def test_the_page_of_fixes():
    line = tables.fixes_page(SAID).splitlines()[-1]
    assert line == (
        "| `a-fix` | RuntimeError: a \\| b | [bitsandbytes#1527](https://github.com/bitsandbytes-foundation/"
        "bitsandbytes/issues/1527) | bitsandbytes >=0.43.0, &lt;0.45.3 | bitsandbytes 0.45.3 |"
    )


def test_the_supported_releases_are_those_of_the_sets():
    table = read()
    assert {name: (found[0], found[-1]) for name, found in table.releases.items()} == supported.RELEASES
    proved = {name for by_set in results.load().values() for name in by_set}
    cells = [cell for cell in table.every if cell.name in proved]
    for found, ends in (
        ({cell.pins["torch"] for cell in cells}, supported.TORCH),
        ({cell.python for cell in cells}, supported.PYTHON),
    ):
        assert (min(found, key=Version), max(found, key=Version)) == ends


def test_the_line_of_the_readme():
    said = tables.readme("# x\n\ndiffusers 0.1 to 0.2, and more\n\nend\n")
    assert said.startswith("# x\n\ndiffusers 0.31.0 to ") and said.endswith(".\n\nend\n")
    torch, python = " to ".join(supported.TORCH), " to ".join(supported.PYTHON)
    assert f"torch {torch} and Python {python}." in " ".join(said.split())


def test_a_stale_page_is_reported(tmp_path):
    path = tmp_path / "PAGE.md"
    with pytest.raises(tables.Stale, match=r"PAGE.md is stale; run python -m tests.upstream.tables --write"):
        tables.check(path, "text")
    path.write_text("other")
    with pytest.raises(tables.Stale):
        tables.check(path, "text")
    path.write_text("text")
    tables.check(path, "text")


def test_results_are_shown_and_what_was_not_run_is_not_known():
    table = read()
    states = (PATCHED, APPLIED, HEALTHY, NOT_APPLICABLE)
    some = [ran(cell, state) for cell, state in zip(table.cells, states, strict=False)]
    found = results.merged({}, some, SAID, table)
    text = tables.compatibility_page(found, SAID, table, {})
    assert signs(text) == ["**P**", "A", "h", "-", *["?"] * (len(table.cells) - 4)]
    assert "Tests ran 2026-11-21 on Linux, " in text and "## Every bitsandbytes on its own" in text
    assert "| T01 | 3.10 | 2.5.1 | 0.31.0 |" in text and "| D14 | 3.11 | 2.13.0 | 0.42.1 |" in text
    assert "Tests ran: none yet" in tables.compatibility_page({}, SAID, table, {})


def test_a_claim_that_changes_makes_its_own_results_stale_and_only_where_its_answer_changes():
    table = read()
    said = {"a-fix": SAID["a-fix"], "b-fix": SAID["a-fix"]}
    both = {"a-fix": {"state": PATCHED}, "b-fix": {"state": PATCHED}}
    found = results.merged({}, [ran(cell, fixes=both) for cell in table.every], said, table)
    narrower = said | {"a-fix": said["a-fix"] | {"claims": {"bitsandbytes": ">=0.43.0,<0.45.2"}}}
    text = tables.compatibility_page(found, narrower, table, {})
    concerned = [cell.pins["bitsandbytes"] == "0.45.2" for cell in table.cells]
    assert any(concerned)
    assert signs(text) == ["?" if hit else "**P**" for hit in concerned]
    assert set(signs(text, "b-fix")) == {"**P**"}
    moved = said | {"a-fix": said["a-fix"] | {"module": "elsewhere"}}
    assert set(signs(tables.compatibility_page(found, moved, table, {}))) == {"?"}
    # What is stale is dropped at the next write, and the results of another run stand beside the rest.
    again = results.merged(found, [ran(table.cells[0], HEALTHY)], narrower, table)
    assert len(again["a-fix"]) == len(table.every) - sum(
        cell.pins["bitsandbytes"] == "0.45.2" for cell in table.every
    )
    assert again["a-fix"][table.cells[0].name].state == HEALTHY
    assert again["b-fix"] == found["b-fix"]


def test_a_run_with_failures_or_other_pins_proves_nothing():
    table = read()
    cell = table.cells[0]
    for more in ({"failures": ["one"]}, {"pins": {}}, {"cell": "elsewhere"}):
        assert results.merged({}, [ran(cell) | more], SAID, table) == {"a-fix": {}}
    assert results.merged({}, [ran(cell, "failed")], SAID, table) == {"a-fix": {}}
    assert results.merged({}, [ran(cell, fixes={"gone": {"state": PATCHED}})], SAID, table) == {"a-fix": {}}


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "results.json"
    table = read()
    assert results.load(path) == {}
    found = results.merged({}, [ran(cell) for cell in table.cells], SAID, table)
    results.save(found, path)
    assert results.load(path) == found
    assert len(path.read_text().splitlines()) == len(SAID) + 2, "one line per fix"


@pytest.mark.parametrize("page", tables.pages(), ids=lambda path: path.name)
def test_a_page_is_not_stale(page):
    tables.check(page, tables.pages()[page])


def test_every_fix_stands_on_both_pages():
    said = declarations()
    for page, ids in (
        (tables.FIXES, {one["fix"] for one in said.values()}),
        (tables.COMPATIBILITY, set(said)),
    ):
        text = page.read_text(encoding="utf-8").replace("`", "")
        assert not [fix_id for fix_id in ids if f"| {fix_id} |" not in text], page
        assert all(name in text for name in said)
