"""`explain`: a page for every fix."""

from __future__ import annotations

import json
import subprocess
import sys

from diffusers_quantfix.advisories.findings import declarations


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diffusers_quantfix", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_names_what_a_person_asks_for():
    done = explain("bnb-quant-state-code")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for text in (
        "need to be on the same GPU",
        "bitsandbytes 0.45.3",
        "issues/1527",
        "skip:bnb-quant-state-code",
    ):
        assert text in said
    assert max(map(len, done.stdout.splitlines())) <= 120  # the prose is that of the source


def test_the_page_for_machines():
    page = json.loads(explain("bnb-quant-state-code", "--json").stdout)
    assert page["id"] == "bnb-quant-state-code"
    assert {"symptom", "fixed_in", "text", "state", "reason", "upstream"} <= set(page)


def test_an_unknown_id_suggests_the_nearest():
    done = explain("bnb-quant-state")
    assert done.returncode == 2
    assert "did you mean bnb-quant-state-" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_fix_says_what_a_page_needs():
    for fix in declarations():
        assert fix.symptom and fix.title, fix.id
        assert all(link.startswith("https://") for link in fix.upstream), fix.id
