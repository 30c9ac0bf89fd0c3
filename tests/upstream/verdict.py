"""Judges what the processes of one cell reported.  Nothing here runs anything.

For every fix, in a pinned cell: the claim fits, the probe says broken, and the defect shows without us: all three or
none of them.  So a claim that is one release too wide or too narrow fails.

A claim over several distributions is a box, and a defect may be an "or" ("old diffusers, or old bitsandbytes"), which
no box says.  There a cell inside may be healthy; `edges.loose` wants every side of the box to be touched instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusers_quantfix.fixes.targets import TARGETS

PATCHED = "patched"  # the defect is reproduced without us, and not with us
APPLIED = "applied"  # claim and probe say broken and the patch takes, but no test could reproduce it here
HEALTHY = "healthy"  # the tests ran, and the defect is not there without us
NOT_APPLICABLE = "n/a"  # the library, its class or its module is not there, or no test can run
FAILED = "failed"


@dataclass
class Run:
    """What one pytest process reported.

    Attributes:
        tests: node id -> its line of the report (``outcome``, ``reason``, ``gates``, ``fixes``, ``seconds``).
        board: the states of the fixes at the end of the patched side, by id.
        died: why the process did not end properly; empty when it did.
        processor_seconds: what it cost, whatever else this machine was doing.
    """

    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    board: dict[str, dict[str, Any]] = field(default_factory=dict)
    died: str = ""
    processor_seconds: float = 0.0

    @classmethod
    def read(cls, path: Path, died: str) -> Run:
        """Read a report of `plugin`; ``died`` says how the process ended, if not well."""
        run, running, ended = cls(died=died), "", False
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                said = json.loads(line)
            except ValueError:  # the last line of a process that was killed while it wrote
                continue
            if "start" in said:
                running = said["start"]
            elif "test" in said:
                run.tests[said["test"]] = said
            elif "end" in said:
                ended = True
                run.processor_seconds = said.get("processor_seconds", 0.0)
                run.board = {
                    answer["id"]: answer
                    for fix in said["board"].get("fixes", ())
                    for answer in fix["targets"]
                }
                if said["end"] not in (0, 1, 5):  # all passed, some failed, none selected
                    run.died = run.died or f"pytest ended with exit status {said['end']}"
        if not ended:
            at = f" in {running}" if running and running not in run.tests else ""
            run.died = f"{died or 'the process ended without a report'}{at}"
        return run


@dataclass
class Verdict:
    """What became of every fix in one cell.

    Attributes:
        fixes: id -> ``state``, ``why``, ``claim``, ``probe``, ``patch``, ``slots``.
        failures: one sentence each; a cell without any is good.
        skips: tests that could not run: ``side``, ``test``, ``reason``.
        counts: how many tests passed, failed and were skipped, both sides together.
    """

    fixes: dict[str, dict[str, Any]]
    failures: list[str]
    skips: list[dict[str, str]]
    counts: dict[str, int]


def judge(
    ids: list[str], bare: Run, patched: Run, found: dict[str, dict[str, Any]], untested_ok: bool = False
) -> Verdict:
    """Judge a pinned cell.

    Args:
        ids: the fixes to judge.
        bare: the side without us.
        patched: the side with us.
        found: what `inspect_fixes` reported.
        untested_ok: a fix without a test is no failure (a cell that runs a part of the tests).
    """
    failures = [f"{side}: {run.died}" for side, run in (("bare", bare), ("patched", patched)) if run.died]
    skips = []
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for side, run in (("bare", bare), ("patched", patched)):
        for test, said in run.tests.items():
            counts[said["outcome"]] += 1
            if said["outcome"] == "failed":
                failures.append(f"{side}: {test}: {said['reason']}")
            elif said["outcome"] == "skipped":
                skips.append({"side": side, "test": test, "reason": said["reason"]})
                if not explained(said["reason"]):
                    failures.append(f"{side}: {test}: skipped without a sentence that says why")
    fixes = {}
    for fix_id in ids:
        report = found.get(fix_id)
        if report is None:
            fixes[fix_id] = {"state": FAILED, "why": "was not inspected"}
            failures.append(f"{fix_id}: was not inspected")
            continue
        state, why, faults = _one(fix_id, bare, patched, report, untested_ok)
        failures += [f"{fix_id}: {fault}" for fault in faults]
        fixes[fix_id] = {
            "state": FAILED if faults or state == FAILED else state,
            "why": "; ".join(faults) or why,
            "claim": report["claim"],
            "probe": report["probe"],
            "patch": report["patch"],
            "slots": report["slots"],
        }
    return Verdict(fixes, failures, skips, counts)


def explained(reason: str) -> bool:
    """Whether a skip says why, in at least three words."""
    return len(reason.split()) >= 3 and reason != "unconditional skip"


def _one(
    fix_id: str, bare: Run, patched: Run, found: dict[str, Any], untested_ok: bool
) -> tuple[str, str, list[str]]:
    """State, reason and faults of one fix, without the failures of its tests, which are counted already."""
    # a file that is skipped as a whole, since it needs what is not here, has no marks
    files = {f"tests/fixes/test_{name.replace('-', '_')}.py" for name in (fix_id, TARGETS[fix_id].fix)}
    tests = {
        name: said for name, said in bare.tests.items() if fix_id in said.get("fixes", ()) or name in files
    }
    passed = [said for said in tests.values() if said["outcome"] == "passed"]
    shown = [said for said in passed if said["gates"].get(fix_id, "").startswith("broken")]
    reasons = "; ".join(
        dict.fromkeys(said["reason"] for said in tests.values() if said["outcome"] == "skipped")
    )
    failed = any(
        said["outcome"] == "failed" and fix_id in said.get("fixes", ())
        for run in (bare, patched)
        for said in run.tests.values()
    )
    claimed, probe, why = found["claim"] == "fits", found["probe"], found["why"]
    faults = drift(found)
    answer = patched.board.get(fix_id, {})
    if answer.get("state") in ("failed", "overwritten"):
        faults.append(f"with us its state is {answer['state']}: {answer['reason']}")
    elif answer and claimed and probe == "broken" and answer["state"] != "applied":
        faults.append(
            f"the probe says broken, but with us its state is {answer['state']}: {answer['reason']}"
        )
    if claimed and probe == "healthy" and passed and not box(found):
        faults.append(f"the claim is too wide: it fits {why}, but the defect is not there")
    if not claimed and probe == "broken":
        faults.append(f"the claim is too narrow, or the probe wrong: {why}, but the probe says broken")
    if found["claim"] == "unreadable":
        faults.append(why or found["detail"])
    if found["claim"] == "missing":
        return NOT_APPLICABLE, why, faults
    if not tests and not untested_ok and not bare.died:
        faults.append("no test with its mark was collected")
    if failed or faults:
        return FAILED, "a test of it failed", faults
    if shown:
        return PATCHED, why, faults
    if claimed and probe == "broken":
        return APPLIED, reasons or "no test of it ran", faults
    if passed:
        return HEALTHY, why, faults
    return NOT_APPLICABLE, reasons or found["detail"] or why, faults


def box(found: dict[str, Any]) -> bool:
    """Whether a claim bounds the releases of more than one distribution."""
    return sum(bool(specifier) for specifier in found.get("claims", {}).values()) > 1


def drift(found: dict[str, Any]) -> list[str]:
    """What a fix expects and did not meet in a release that it claims."""
    if found["claim"] != "fits":
        return []
    if found["probe"] in ("missing", "absent"):
        return [f"drift: in {found['why']} its target is not there: {found['detail']}"]
    if found["probe"] == "failed":
        return [f"drift: in {found['why']}: {found['detail']}"]
    if found["probe"] == "broken" and found["patch"] != "ok":
        return [f"drift: in {found['why']}: {found['patch']}"]
    return []
