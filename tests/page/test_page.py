"""The page of results, in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests import page
from tests.page.__main__ import data, main

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert main([str(path)]) == 0
    return path


def opened(file, fragment: str) -> str:
    """The document after the scripts of the page ran."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium or Chrome here")
    profile = file.parent / "profile"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [browser, *options, "--virtual-time-budget=5000", "--dump-dom", f"{file.as_uri()}#{fragment}"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout


def test_it_needs_nothing_else(file) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=|@import|url\(|fetch\(""", text)
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(found[1]) == json.loads(json.dumps(data()))
    assert page.__doc__


def test_every_row_is_shown_and_counted(file) -> None:
    tested = data()["pipelines"]
    shown = opened(file, "view=pipelines&release=0&backend=bnb-nf4")
    position = tested["releases"][0]["backends"].index("bnb-nf4")
    ran = [name for name, rows in tested["pipelines"].items() if rows[0] and rows[0][position] >= 0]
    rows = re.findall(r'<th scope="row">(\w+)</th>', shown)
    assert sorted(rows) == sorted([*ran, *tested["not_built"][0]])
    signs = [tested["outcomes"][tested["pipelines"][name][0][position]][0] for name in ran]
    exact, refused = (sum(row.count(sign) for row in signs) for sign in "=u")
    assert f"{exact} exact, {refused} refused" in shown
    cells = re.findall(r'<button type="button" class="(\w+)" title', shown)
    assert (cells.count("exact"), cells.count("refused")) == (exact, refused)


@pytest.mark.parametrize(
    ("fragment", "wanted", "absent"),
    [
        ("search=flux&backend=bnb-nf4", "FluxPipeline<", "WanPipeline<"),
        ("search=no+such+pipeline", "No pipeline with this name", "<th scope=\"row\""),
        ("view=fixes&search=params4bit", "bnb-", "diffusers-param-device<"),
        ("release=99&backend=none", "diffusers", "undefined"),
    ],
    ids=["search", "nothing", "fixes", "strange"],
)  # fmt: skip
def test_a_link_leads_to_what_it_names(file, fragment, wanted, absent) -> None:
    shown = opened(file, fragment).partition("<script")[0]
    assert wanted in shown
    assert absent not in shown
