"""The judge: a claim that is off by one fails in both directions, and nothing is passed over."""

from __future__ import annotations

import ctypes
import json
import types

import pytest

from diffusers_quantfix.fixes.targets import TARGETS
from tests.upstream import newest
from tests.upstream.cells import Cell
from tests.upstream.edges import loose
from tests.upstream.inspect_fixes import misfit
from tests.upstream.verdict import APPLIED, FAILED, HEALTHY, NOT_APPLICABLE, PATCHED, Run, judge

FIX = "bnb-quant-state-code"
TEST = "tests/fixes/test_it.py::test_it"


def ran(gate="", outcome="passed", reason="", state=""):
    test = {
        "test": TEST,
        "outcome": outcome,
        "reason": reason,
        "fixes": [FIX],
        "gates": {FIX: gate} if gate else {},
    }
    return Run({TEST: test}, {FIX: {"state": state, "reason": "said the board"}} if state else {})


def found(claim="fits", probe="broken", patch="ok", detail=""):
    return {FIX: {"claim": claim, "why": "bitsandbytes 0.45.2", "probe": probe, "patch": patch, "detail": detail,
                  "slots": []}}  # fmt: skip


def state_of(verdict):
    return verdict.fixes[FIX]["state"]


def test_red_without_us_and_green_with_us_is_patched():
    verdict = judge([FIX], ran("broken: 0.45.2"), ran(state="applied"), found())
    assert (state_of(verdict), verdict.failures) == (PATCHED, [])
    assert verdict.counts == {"passed": 2, "failed": 0, "skipped": 0}


def test_green_without_us_is_healthy_outside_of_the_claim():
    verdict = judge(
        [FIX], ran("out-of-range: 0.45.3"), ran(state="out-of-range"), found("out-of-range", "healthy", "")
    )
    assert (state_of(verdict), verdict.failures) == (HEALTHY, [])


def test_a_claim_that_is_too_wide_fails():
    verdict = judge([FIX], ran("healthy: 0.45.3"), ran(state="healthy"), found("fits", "healthy", ""))
    assert state_of(verdict) == FAILED
    assert "the claim is too wide" in verdict.failures[0]


def test_a_box_may_hold_a_healthy_cell_but_every_side_must_be_touched():
    claims = {"diffusers": "<=0.42.1", "bitsandbytes": ""}
    inside = found("fits", "healthy", "")
    inside[FIX]["claims"] = claims | {"bitsandbytes": "<0.48"}
    assert state_of(judge([FIX], ran("healthy: x"), ran(state="healthy"), inside)) == HEALTHY
    inside[FIX]["claims"] = claims
    assert state_of(judge([FIX], ran("healthy: x"), ran(state="healthy"), inside)) == FAILED

    releases = {"diffusers": ["0.36.0", "0.42.1"], "bitsandbytes": ["0.45.2", "0.50.2"]}
    claims = {"diffusers": "<=0.42.1", "bitsandbytes": ">=0.45"}

    def results(*states):
        pins = [("0.36.0", "0.50.2"), ("0.42.1", "0.45.2"), ("0.42.1", "0.50.2")]
        return [
            (Cell("x", "3.11", {"diffusers": d, "bitsandbytes": b}), {"fixes": {FIX: {"state": state}}})
            for (d, b), state in zip(pins, states, strict=True)
        ]

    assert loose(claims, FIX, releases, results(PATCHED, PATCHED, HEALTHY)) == []
    assert loose(claims, FIX, releases, results(PATCHED, HEALTHY, HEALTHY)) == [
        "its claim on diffusers is too wide: with 0.42.1 the defect shows in no cell",
        "its claim on bitsandbytes is too wide: with 0.45.2 the defect shows in no cell",
    ]


def test_a_claim_that_is_too_narrow_fails():
    # The body fails without us where the gate says out of range; pytest's side reports it, and the probe too.
    bare = ran("out-of-range: 0.45.2", "failed", "RuntimeError: All input tensors need to be on the same GPU")
    verdict = judge(
        [FIX], bare, ran(outcome="failed", reason="the same"), found("out-of-range", "broken", "")
    )
    assert state_of(verdict) == FAILED
    assert any("the claim is too narrow" in line for line in verdict.failures)
    assert any("All input tensors" in line for line in verdict.failures)


def test_a_claim_that_fits_where_nothing_shows_fails():
    bare = ran("broken: 0.45.3", "failed", "the gate says broken, but no defect showed")
    assert "no defect showed" in judge([FIX], bare, ran(state="applied"), found()).failures[0]


def test_a_target_that_moved_is_drift_with_release_and_name():
    gone = found("fits", "missing", "", "bitsandbytes.functional has no QuantState")
    (line,) = judge([FIX], ran("missing: x"), ran(state="missing"), gone).failures
    assert "drift" in line and "bitsandbytes 0.45.2" in line and "has no QuantState" in line
    narrower = found(patch="QuantState.to(self, device) is replaced by (self): it takes no argument device")
    assert "drift" in judge([FIX], ran("broken: x"), ran(state="applied"), narrower).failures[0]


def test_a_target_that_is_absent_outside_of_the_claim_is_no_drift():
    verdict = judge(
        [FIX], ran("out-of-range: x"), ran(), found("out-of-range", "missing", "", "no such class")
    )
    assert (state_of(verdict), verdict.failures) == (HEALTHY, [])


def test_a_fix_that_did_not_install_fails():
    verdict = judge([FIX], ran("broken: x"), ran(state="failed"), found())
    assert "with us its state is failed: said the board" in verdict.failures[0]
    verdict = judge([FIX], ran("broken: x"), ran(state="waiting"), found())
    assert "its state is waiting" in verdict.failures[0]


def test_skips_are_counted_and_must_say_why():
    explained = ran("", "skipped", "needs a CPU with AVX512-BF16")
    verdict = judge([FIX], explained, explained, found())
    assert (state_of(verdict), verdict.failures) == (APPLIED, [])
    assert verdict.counts["skipped"] == 2 and "AVX512" in verdict.fixes[FIX]["why"]
    for reason in ("", "unconditional skip", "later"):
        verdict = judge([FIX], ran("", "skipped", reason), ran(), found())
        assert "skipped without a sentence" in verdict.failures[0]


def test_a_library_that_is_not_there_is_not_applicable():
    away = ran("", "skipped", "needs quanto, which is not here")
    verdict = judge([FIX], away, away, found("missing", "", ""))
    assert (state_of(verdict), verdict.failures) == (NOT_APPLICABLE, [])


def test_a_fix_without_a_test_fails():
    assert "no test with its mark" in judge([FIX], Run(), Run(), found()).failures[0]
    assert judge([FIX], Run(), Run(), found(), untested_ok=True).failures == []


@pytest.mark.parametrize("target", [FIX, next(name for name, one in TARGETS.items() if one.fix != name)])
def test_a_file_that_is_skipped_as_a_whole_is_of_every_target_of_its_fix(target):
    file = f"tests/fixes/test_{TARGETS[target].fix.replace('-', '_')}.py"
    away = Run({file: {"test": file, "outcome": "skipped", "reason": "its library is not here"}})
    report = found("out-of-range", "missing", "", "no such class")[FIX]
    assert judge([target], away, away, {target: report}).failures == []


def test_a_fix_that_was_not_inspected_fails():
    assert judge([FIX], ran("broken: x"), ran(), {}).failures == [f"{FIX}: was not inspected"]


@pytest.mark.parametrize("half", ['{"test": "a::b", "outc', ""])
def test_a_process_that_dies_is_named_with_its_test(tmp_path, half):
    path = tmp_path / "bare.jsonl"
    done = {"test": "a::a", "outcome": "passed", "reason": "", "gates": {}, "fixes": []}
    path.write_text(
        "\n".join([json.dumps({"start": "a::a"}), json.dumps(done), json.dumps({"start": "a::b"}), half])
    )
    run = Run.read(path, "killed by SIGSEGV")
    assert run.died == "killed by SIGSEGV in a::b"
    assert judge([], run, Run(), {}).failures == ["bare: killed by SIGSEGV in a::b"]


def test_a_report_that_was_never_written_is_a_failure(tmp_path):
    assert Run.read(tmp_path / "none.jsonl", "").died == "the process ended without a report"


def test_a_usage_error_of_pytest_is_a_failure(tmp_path):
    path = tmp_path / "bare.jsonl"
    path.write_text(json.dumps({"end": 4, "board": {}}))
    assert "exit status 4" in Run.read(path, "").died


def news(bare, patched, inspected):
    verdict = newest.assess([FIX], bare, patched, inspected)
    return verdict.fixes[FIX]["news"], verdict.failures


def test_on_a_new_release_a_fixed_defect_is_news_and_no_failure():
    assert news(ran("healthy: x"), ran(state="healthy"), found("fits", "healthy", "")) == (newest.RETIRED, [])


def test_on_a_new_release_an_open_claim_is_news_and_no_failure():
    bare = ran("out-of-range: x", "failed", "still red")
    inspected = found("out-of-range", "broken")
    assert news(bare, ran(outcome="failed", reason="red"), inspected) == (newest.UNCLAIMED, [])


def test_on_a_new_release_a_standing_defect_still_applies():
    assert news(ran("broken: x"), ran(state="applied"), found()) == (newest.APPLIES, [])


def test_on_a_new_release_drift_is_a_failure():
    kind, failures = news(
        ran("missing: x"), ran(state="missing"), found("fits", "missing", "", "no QuantState")
    )
    assert kind == newest.DRIFTED and failures
    kind, failures = news(ran("broken: x"), ran(outcome="failed", reason="wrong", state="applied"), found())
    assert kind == newest.DRIFTED and failures


def test_what_takes_fewer_arguments_does_not_fit_and_native_code_does_not_say():
    def entry(old):
        return types.SimpleNamespace(old=old, new=lambda code: None, where="lib.f")

    assert misfit(entry(lambda *args: None)) == "lib.f(*args) is replaced by (code): it takes no *args"
    assert not misfit(entry(lambda code: None))
    # Python 3.13 tells (*args, **kwargs)
    assert not misfit(entry(ctypes.pythonapi.Py_GetVersion))
