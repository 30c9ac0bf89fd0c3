"""The page of pipelines, from the committed results: ``python -m tests.pipelines.table [--write | --check]``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.pipelines import results
from tests.pipelines.families import NOT_BUILT

PAGE = Path(__file__).resolve().parents[2] / "diffusers_quantfix" / "PIPELINES.md"
STEPS = ("build", "load")
SIGNS = {"exact": "=", "upstream's": "u", "fails": "**x**"}


def kind(said: str) -> str:
    """The word of ``SIGNS`` for an outcome."""
    if said == results.EXACT:
        return "exact"
    return "upstream's" if said.startswith("upstream: ") else "fails"


def totals(found: dict) -> str:
    """One line: how many pipelines and placements, and what became of them."""
    placed: Counter = Counter()
    refused, unbuilt, pipelines = set(), set(NOT_BUILT), set()
    for name, backends in found["outcomes"].items():
        for outcomes in backends.values():
            if outcomes.get("build", results.EXACT) != results.EXACT:
                unbuilt.add(name)
            elif is_run(outcomes):
                pipelines.add(name)
            if is_refused(outcomes):
                refused.add(name)
            placed.update(kind(said) for step, said in outcomes.items() if step not in STEPS)
    exact, upstream, fails = (placed[sign] for sign in SIGNS)
    return (
        f"diffusers {found['versions'].get('diffusers')}: {len(pipelines)} pipelines run here, {len(unbuilt)} cannot "
        f"be built, {len(pending(found))} were not tried yet; {exact} placements of quantized ones are exact, "
        f"{upstream} fail un-quantized too, {fails} fail; {len(refused)} pipelines do not run quantized."
    )


def is_run(outcomes: dict[str, str]) -> bool:
    """Whether the pipeline is built here, and was seen to run or to fail."""
    return outcomes.get("build", results.EXACT) == results.EXACT and has_verdict(outcomes)


def is_refused(outcomes: dict[str, str]) -> bool:
    """Whether the pipeline is built, and does not run quantized."""
    return outcomes.get("build", results.EXACT) == results.EXACT != outcomes.get("load", results.EXACT)


def has_verdict(outcomes: dict[str, str]) -> bool:
    """Whether it was seen in a placement, or seen to fail before one."""
    before = [said for step, said in outcomes.items() if step in STEPS]
    return len(before) < len(outcomes) or any(said != results.EXACT for said in before)


def pending(found: dict) -> list[str]:
    """The pipelines of which nothing can be said: no run has reached a placement."""
    seen = {name for name, backends in found["outcomes"].items() if any(map(has_verdict, backends.values()))}
    return sorted(set(found["outcomes"]) - seen - set(NOT_BUILT))


def page(found: dict) -> str:
    placements = _placements(found)
    lines = [
        "# Every pipeline, quantized, in every placement",
        "",
        "Generated from tests/pipelines/results.json by `python -m tests.pipelines.table --write`; do not edit.",
        "`python -m tests.pipelines --json tests/pipelines/results.json` runs what is not in it yet.",
        "",
        totals(found),
        "",
        "Tiny random instances, on two stand-ins for CUDA devices. **=**: the output of the same quantized pipeline on",
        "one device, bit for bit, and nothing left behind. **u**: fails un-quantized too. **x**: fails, see below.",
        "**q**: does not run quantized, wherever it is.",
        "Empty: not run yet. With: "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + ".",
        "",
        "| pipeline | backend | " + " | ".join(placements) + " |",
        "| --- | --- |" + " --- |" * len(placements),
    ]
    notes, unbuilt = [], dict(NOT_BUILT)
    for name, backends in sorted(found["outcomes"].items()):
        for backend, outcomes in sorted(backends.items()):
            if (said := outcomes.get("build", results.EXACT)) != results.EXACT:
                unbuilt.setdefault(name, said)
                continue
            cells = [SIGNS[kind(outcomes[one])] if one in outcomes else "" for one in placements]
            if is_refused(outcomes):
                cells = ["**q**"] * len(placements)
            lines.append(f"| {name} | {backend} | " + " | ".join(cells) + " |")
            notes += [
                f"- {name}, {backend}, {one}: {_code(said)}"
                for one, said in outcomes.items()
                if said != results.EXACT
            ]
    lines += ["", "## What is not exact", "", *notes, "", "## Not built here", ""]
    lines += [f"- {name}: {_code(reason)}" for name, reason in sorted(unbuilt.items())]
    lines += ["", "## Not run yet", "", ", ".join(pending(found)) or "none"]
    return "\n".join(lines) + "\n"


def _placements(found: dict) -> list[str]:
    from tests.pipelines.check import ALL

    said = {step for backends in found["outcomes"].values() for one in backends.values() for step in one}
    return [placement for placement in ALL if placement in said]


def _code(text: str) -> str:
    return f"`{text.replace('`', '').replace('|', '/')}`"


def main(argv: list[str]) -> int:
    text = page(results.read(results.FILE))
    if "--write" in argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.name} is not what the results say: python -m tests.pipelines.table --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
