"""The page of pipelines, the README's line of totals and the data of `explain PIPELINE`, from the committed results.

python -m tests.pipelines.table [--write | --check]
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from tests.pipelines import packed, results
from tests.pipelines.backends import PLAIN, REFUSED
from tests.pipelines.families import NOT_BUILT

PAGE = Path(__file__).resolve().parents[2] / "diffusers_quantfix" / "PIPELINES.md"
README = PAGE.parents[1] / "README.md"
STEPS = ("build", "load")
SIGNS = {"exact": "=", "upstream's": "u", "fails": "**x**"}


def kind(said: str) -> str:
    """The word of ``SIGNS`` for an outcome."""
    if said == results.EXACT:
        return "exact"
    return "upstream's" if said.startswith("upstream: ") else "fails"


def count(found: dict) -> tuple[int, int, int, int]:
    """(pipelines that ran quantized, exact placements, those that fail un-quantized too, those that fail)."""
    placed: Counter = Counter()
    ran = set()
    for name, backends in found["outcomes"].items():
        for backend, outcomes in backends.items():
            if backend == PLAIN:
                continue
            kinds = [kind(said) for step, said in outcomes.items() if step not in STEPS]
            placed.update(kinds)
            if kinds:
                ran.add(name)
    return len(ran), *(placed[sign] for sign in SIGNS)


def brief(found: dict) -> str:
    """What the README says of the newest set."""
    ran, exact, upstream, fails = count(found)
    said = f"{ran} pipelines, {exact} placements of quantized ones exact, {upstream} fail un-quantized too"
    return f"{said}, {fails} fail" if fails else said


def totals(found: dict) -> list[str]:
    """A table for one set: in how many pipelines each backend was exact in each placement, of how many."""
    placements, rows = _placements(found), []
    for backend in sorted({one for backends in found["outcomes"].values() for one in backends}):
        tried = [backends[backend] for backends in found["outcomes"].values() if backend in backends]
        cells = []
        for placement in placements:
            kinds = Counter(kind(outcomes[placement]) for outcomes in tried if placement in outcomes)
            others = [
                f"{kinds[word]} {sign}" for word, sign in SIGNS.items() if word != "exact" and kinds[word]
            ]
            cells.append(", ".join([str(kinds["exact"]), *others]) if kinds else "")
        ran = sum(any(step not in STEPS for step in outcomes) for outcomes in tried)
        rows.append(f"| {backend} | {ran} | " + " | ".join(cells) + " |")
    head = "| backend | pipelines | " + " | ".join(placements) + " |"
    return [head, "| --- | --- |" + " --- |" * len(placements), *rows]


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


def page(sets: dict[str, dict]) -> str:
    """The page: totals of each set (``sets``: file name -> results, the newest first), each pipeline of the newest."""
    newest = next(iter(sets.values()))
    lines = [
        "# Every pipeline, quantized, in every placement",
        "",
        "Generated from tests/pipelines/results*.json by `python -m tests.pipelines.table --write`; do not edit.",
        "`python -m tests.page FILE` writes the same as an HTML page with filters.",
        "`python -m tests.pipelines.sets` runs, in the newest release set and in older ones, what is not in them.",
        "",
        "Tiny random instances, on two stand-ins for CUDA devices; denoisers and text encoders are quantized.",
        "**=**: the output of the same quantized pipeline on one device, bit for bit, and nothing left behind.",
        "In the newest set, other results of the layers of a denoiser were seen to change the output.",
        "**u**: fails un-quantized too. **x**: fails, see below. **q**: does not run quantized, wherever it is.",
        "Empty: not run yet. In the tables of totals a number alone is exact.",
    ]
    for found in sets.values():
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        lines += ["", f"## diffusers {found['versions']['diffusers']}", "", f"With {versions}.{_also(found)}"]
        lines += [f"{brief(found)}.", "", *totals(found)]
    lines += ["", f"## Each pipeline of diffusers {newest['versions']['diffusers']}", "", *_each(newest)]
    for found in sets.values():
        release = found["versions"]["diffusers"]
        notes, unbuilt = _remarks(found)
        if found is newest:
            unbuilt = {**unbuilt, **NOT_BUILT}
        lines += ["", f"## What is not exact, diffusers {release}", "", *(notes or ["Nothing."])]
        lines += ["", f"## Not built here, diffusers {release}", ""]
        lines += [f"- {name}: {_code(reason)}" for name, reason in sorted(unbuilt.items())]
    lines += ["", "## Components that a backend leaves as they are", ""]
    lines += [
        f"- {model}, {backend}: {_code(reason)}" for (backend, model), reason in sorted(REFUSED.items())
    ]
    lines += ["", "## Not run yet", "", ", ".join(pending(newest)) or "none"]
    return "\n".join(lines) + "\n"


def _also(found: dict) -> str:
    """Which releases some rows ran with instead."""
    said = ""
    for others, pipelines in sorted(found.get("also_with", {}).items()):
        number = sum(len(each) for backends in pipelines.values() for each in backends.values())
        said += f" {number} outcomes of {len(pipelines)} pipelines ran with {others}."
    return said


def _each(found: dict) -> list[str]:
    """The table of pipelines and backends by placement."""
    placements = _placements(found)
    lines = [
        "| pipeline | backend | " + " | ".join(placements) + " |",
        "| --- | --- |" + " --- |" * len(placements),
    ]
    for name, backends in sorted(found["outcomes"].items()):
        for backend, outcomes in sorted(backends.items()):
            if outcomes.get("build", results.EXACT) != results.EXACT:
                continue
            cells = [SIGNS[kind(outcomes[one])] if one in outcomes else "" for one in placements]
            if is_refused(outcomes):
                cells = ["**q**"] * len(placements)
            lines.append(f"| {name} | {backend} | " + " | ".join(cells) + " |")
    return lines


def _remarks(found: dict) -> tuple[list[str], dict[str, str]]:
    """What is not exact, a line each; and the pipelines that are not built -> the error."""
    notes, unbuilt = [], {}
    for name, backends in sorted(found["outcomes"].items()):
        for backend, outcomes in sorted(backends.items()):
            if (said := outcomes.get("build", results.EXACT)) != results.EXACT:
                unbuilt[name] = said
                continue
            notes += [
                f"- {name}, {backend}, {one}: {_code(said)}"
                for one, said in sorted(outcomes.items())
                if said != results.EXACT
            ]
    return notes, unbuilt


def _placements(found: dict) -> list[str]:
    from tests.pipelines.modular import ALL as MODULAR
    from tests.pipelines.placing import ALL

    said = {step for backends in found["outcomes"].values() for one in backends.values() for step in one}
    return [placement for placement in dict.fromkeys((*ALL, *MODULAR)) if placement in said]


def _code(text: str) -> str:
    return f"`{text.replace('`', '').replace('|', '/')}`"


def files() -> dict[str, dict]:
    """File name -> the committed results, the newest set first."""
    paths = (results.FILE, *map(results.older, results.OLDER))
    return {path.name: results.read(path) for path in paths if path.exists()}


def readme(text: str, found: dict) -> str:
    """The README with the totals of the newest set behind the name of the page."""
    return re.sub(rf"(?<=`{PAGE.name}` )\([^)]*\)", f"({brief(found)})", text)


def main(argv: list[str]) -> int:
    sets = files()
    old = README.read_text(encoding="utf-8")
    wanted = {
        PAGE: page(sets),
        README: readme(old, next(iter(sets.values()))),
        packed.PATH: packed.text(sets),
    }
    bad = False
    for path, text in wanted.items():
        if "--write" in argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is not what the results say: python -m tests.pipelines.table --write")
            bad = True
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
