"""The tables of the documentation: how they are made, how a stale one is told, and that they say what is declared."""

from __future__ import annotations

import pytest

from tests.upstream import tables
from tests.upstream.cells import read
from tests.upstream.run_cell import declarations, declared_key

SAID = {"a-fix": {"claims": {"bitsandbytes": ">=0.43.0,<0.45.3"}, "fixed_in": "bitsandbytes 0.45.3", "module": "m",
                  "title": "t", "symptom": "RuntimeError: a | b", "upstream":
                  ["https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1527"]}}  # fmt: skip


def test_the_table_of_fixes():
    line = tables.fixes_table(SAID).splitlines()[-1]
    assert line == (
        "| `a-fix` | RuntimeError: a \\| b | [bitsandbytes#1527](https://github.com/bitsandbytes-foundation/"
        "bitsandbytes/issues/1527) | bitsandbytes >=0.43.0, &lt;0.45.3 | bitsandbytes 0.45.3 |"
    )


def test_a_stale_readme_is_told():
    readme = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    with pytest.raises(tables.Stale, match="stale"):
        tables.check_readme(readme, tables.fixes_table(SAID))
    new = tables.with_fixes(readme, tables.fixes_table(SAID))
    tables.check_readme(new, tables.fixes_table(SAID))
    assert new.startswith("before\n") and new.endswith("\nafter\n")
    with pytest.raises(tables.Stale, match="fixes:begin"):
        tables.check_readme("no markers", "")


def test_a_stale_page_is_told():
    table = read()
    results = {
        cell.name: {
            "pins": cell.pins, "date": "2026-11-21", "declared": "d", "failures": [],
            "fixes": {"a-fix": {"state": "patched"}},
        }
        for cell in table.every
    }  # fmt: skip
    text = tables.page(results, "d", table, ["a-fix"])
    tables.check_page(text, "d", table)
    assert "| a-fix | **M** |" in text and "2026-11-21" in text and "Every bitsandbytes on its own" in text
    with pytest.raises(tables.Stale, match="other declarations or cells"):
        tables.check_page(text, "another", table)
    for name, change, says in (
        ("D04", None, "no result for D04"),
        ("D05", {"declared": "older"}, "no result for D05"),
        ("D05", {"failures": ["one"]}, "failures in D05"),
    ):
        changed = {cell: found for cell, found in results.items() if cell != name or change}
        if change:
            changed[name] = results[name] | change
        with pytest.raises(tables.Stale, match=says):
            tables.page(changed, "d", table, ["a-fix"])


def test_a_set_that_was_not_run_says_so():
    table = read()
    ran = {
        "pins": {},
        "date": "2026-11-21",
        "declared": "d",
        "failures": [],
        "fixes": {"a-fix": {"state": "patched"}},
    }
    results = {cell.name: ran for cell in table.cells if cell.ci}
    text = tables.page(results, "d", table, ["a-fix"])
    (row,) = (line for line in text.splitlines() if line.startswith("| a-fix |"))
    signs = [cell.strip() for cell in row.split("|")[2:-1]]
    assert signs == ["**M**" if cell.ci else "?" for cell in table.cells]
    assert "on their own were not run" in text


def test_the_table_of_fixes_in_the_readme_is_not_stale():
    tables.check_readme(tables.README.read_text(encoding="utf-8"), tables.fixes_table(declarations()))


def test_the_compatibility_page_is_not_stale():
    text = tables.PAGE.read_text(encoding="utf-8") if tables.PAGE.exists() else ""
    tables.check_page(text, declared_key(), read())
