"""The README: its examples are what the tools print, its lists are complete, its links work on a package index too."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from diffusers_quantfix.__main__ import COMMANDS
from diffusers_quantfix.engine.board import STATES
from diffusers_quantfix.engine.settings import WORDS
from diffusers_quantfix.fixes import FIXES, NAMES
from tests.upstream.cells import MAIN, read

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OUTPUTS = re.findall(r"<!-- output: (.*?) -->\n```text\n(.*?)\n```", README, re.DOTALL)
ID = r"`((?:accelerate|bnb|diffusers|peft|quanto|torchao|transformers)-[a-z0-9-]+)`"


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("call", "excerpt"),
    [
        # what imports the stack is slow, and prints what it finds here
        pytest.param(call, excerpt, id=call, marks=() if call.startswith("check") else pytest.mark.thorough)
        for call, excerpt in OUTPUTS
    ],
)
def test_an_example_is_what_is_printed(call: str, excerpt: str):
    arguments, _, given = call.partition(" < ")
    if not arguments.startswith("check"):
        pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", *arguments.split()],
        input=given, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    position = 0
    for part in re.split(r"(?m)^\.\.\.\n?", f"{excerpt}\n"):
        found = done.stdout.find(part.strip("\n"), position)
        assert found >= 0, f"`{arguments}` does not print this any more:\n{part}"
        position = found + len(part.strip("\n"))


def test_there_are_examples():
    assert {call.split()[0] for call, _ in OUTPUTS} == {"check", "explain"}


def test_the_lists_are_complete():
    for command in COMMANDS:
        assert f"`{command}`" in section("Tools"), command
    for state in STATES:
        assert f"| {state} |" in section("Activation and status"), state
    for word in (*WORDS, "skip:<id>", "only:<id>"):
        assert f"`{word}`" in section("Switching off, and on in newer releases"), word


def rows() -> list[list[str]]:
    """The cells of the table of symptoms, without its head."""
    lines = [line for line in section("Is this your problem?").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_symptom_names_its_fix():
    assert len(rows()) >= 30
    for row in rows():
        assert len(row) == 3, row
        assert re.fullmatch(f"{ID}(, {ID})*", row[2]), row


def test_every_fix_that_is_named_is_there_and_each_has_its_page():
    for fix_id in re.findall(ID, README):
        assert fix_id in NAMES or fix_id == "diffusers-quantfix", fix_id
    page = (ROOT / "diffusers_quantfix" / "FIXES.md").read_text(encoding="utf-8")
    assert not [fix_id for fix_id in FIXES if f"| `{fix_id}` |" not in page]


def test_an_error_text_is_one_that_a_fix_knows():
    """Error texts of the table are found in the symptom of a fix."""
    page = (ROOT / "diffusers_quantfix" / "FIXES.md").read_text(encoding="utf-8")
    plain = re.sub(r"[`\s]+", " ", page)
    cells = "\n".join(row[0] for row in rows())
    texts = re.findall(r"`` (.+?) ``|(?<!`)`((?:\w+Error: )?[A-Z][^`]{25,})`", cells)
    assert len(texts) >= 10
    for text in (one or other for one, other in texts):
        core = re.sub(r"^\w+Error: ", "", re.sub(r"[`\s]+", " ", text)).strip()
        assert core in plain, core


def test_the_supported_range_is_the_tested_one():
    releases = read().releases
    for name in (*MAIN, "optimum-quanto"):
        assert f"{name} {releases[name][0]} to {releases[name][-1]}" in section("Supported releases"), name
    python = re.search(
        r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert python and f"Python {python[1]} or newer" in section("Supported releases")


def test_no_link_breaks_on_a_package_index():
    assert re.findall(r"\]\(([^)]+)\)", README), "there are links"
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://"), link


def test_the_files_that_are_named_are_there():
    names = re.findall(r"`((?:tests|diffusers_quantfix)/[^`\s]*)`", README)
    assert len(names) >= 4
    for name in names:
        assert (ROOT / name).exists(), name


def test_the_links_of_the_benchmarks_are_there():
    page = ROOT / "tests" / "benchmarks" / "README.md"
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_the_programs_compile():
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")


def test_the_readme_is_short_and_fits_a_screen():
    lines = README.splitlines()
    assert len(lines) <= 200
    for number, line in enumerate(lines, 1):
        if not line.startswith(("|", "python3.11", ".venv")):
            assert len(line) <= 120, f"README.md, line {number}"


def test_someone_with_an_error_message_need_not_scroll():
    """What to type stands in the first screen, and the table of errors follows it."""
    lines = README.splitlines()
    assert lines.index("pip install diffusers-quantfix") < lines.index("## Is this your problem?") < 25
    assert any(line.startswith("import diffusers_quantfix") for line in lines[:20])
    # Between double quotes a shell runs what stands between backticks.
    assert not re.search(r'explain "', README)


def test_the_figures_are_those_of_the_benchmarks():
    """The page of the benchmarks is the one place of a figure."""
    page = (ROOT / "tests" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    figures = re.findall(r"\d+\.\d+|\d+ %", section("Costs"))
    assert len(figures) >= 6
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}", page), figure
