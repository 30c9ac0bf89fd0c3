"""The tables of the documentation say what is declared now."""

from __future__ import annotations

from tests.upstream import tables
from tests.upstream.cells import read
from tests.upstream.run_cell import declarations, declared_key


def test_the_table_of_fixes_in_the_readme():
    tables.check_readme(tables.README.read_text(encoding="utf-8"), tables.fixes_table(declarations()))


def test_the_compatibility_page():
    text = tables.PAGE.read_text(encoding="utf-8") if tables.PAGE.exists() else ""
    tables.check_page(text, declared_key(), read())
