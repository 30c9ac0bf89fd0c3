"""`check`: every kind of input, the three exit codes, and nothing imported."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from diffusers_quantfix.advisories import AFFECTED, MAYBE, findings, overlap
from diffusers_quantfix.pins import UnreadableInput, read_pins

CODE = "bnb-quant-state-code"  # bitsandbytes >=0.43.0,<0.45.3


def check(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diffusers_quantfix", "check", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def pins_of(tmp_path: pathlib.Path, name: str, text: str) -> dict[str, str]:
    file = tmp_path / name
    file.write_text(text)
    return read_pins(str(file))


REQUIREMENTS = """\
# comment
--index-url https://example.invalid/simple
-r more.txt
bitsandbytes == 0.45.2 \\
    --hash=sha256:abc \\
    --hash=sha256:def
diffusers[torch]==0.33.1  # why
transformers==4.51.3; python_version >= "3.8"
accelerate==0.1; python_version < "3.8"
-e git+https://example.invalid/peft.git#egg=peft
https://example.invalid/torch-2.6.0%2Bcu124-cp311-cp311-linux_x86_64.whl
gguf @ https://example.invalid/gguf-0.10.0-py3-none-any.whl
-e .
"""


def test_a_requirements_file(tmp_path):
    (tmp_path / "more.txt").write_text("-c limits.txt\n-r requirements.txt\naccelerate>=1.0\n")
    (tmp_path / "limits.txt").write_text("accelerate<1.7\n")
    assert pins_of(tmp_path, "requirements.txt", REQUIREMENTS) == {
        "accelerate": "<1.7,>=1.0",
        "bitsandbytes": "==0.45.2",
        "diffusers": "==0.33.1",
        "transformers": "==4.51.3",
        "peft": "",
        "torch": "==2.6.0+cu124",
        "gguf": "==0.10.0",
    }


PYPROJECT = """
[project]
name = "app"
dependencies = ["bitsandbytes>=0.44", "Diffusers==0.33.1"]
[project.optional-dependencies]
fast = ["accelerate"]
[dependency-groups]
dev = ["peft", {include-group = "test"}]
test = ["pytest"]
[tool.poetry.dependencies]
python = "^3.11"
torch = "^2.4"
transformers = {version = "~4.51.3", extras = ["x"]}
gguf = "0.10.0"
"""


def test_a_project_file(tmp_path):
    assert pins_of(tmp_path, "pyproject.toml", PYPROJECT) == {
        "bitsandbytes": ">=0.44",
        "diffusers": "==0.33.1",
        "accelerate": "",
        "peft": "",
        "pytest": "",
        "torch": "<3,>=2.4",
        "transformers": "~=4.51.3",
        "gguf": "==0.10.0",
    }


@pytest.mark.parametrize("name", ["uv.lock", "poetry.lock"])
def test_a_lock_file(tmp_path, name):
    text = '[[package]]\nname = "Bits_And.bytes"\nversion = "0.45.2"\n[[package]]\nname = "local"\n'
    assert pins_of(tmp_path, name, text) == {"bits-and-bytes": "==0.45.2"}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "fine\n\n]broken[\n", "a.txt, line 3"),
        ("b.txt", "-r nowhere.txt\n", "b.txt, line 1.*nowhere.txt: No such file"),
        ("c.toml", "[project\n", "c.toml"),
        ("uv.lock", 'package = "x"\n', "no \\[\\[package\\]\\] tables"),
        ("d.toml", '[project]\ndependencies = ["a b c"]\n', "d.toml: 'a b c' is no requirement"),
    ],
)
def test_what_cannot_be_read_names_the_file_and_the_line(tmp_path, name, text, sentence):
    with pytest.raises(UnreadableInput, match=sentence):
        pins_of(tmp_path, name, text)
    done = check(tmp_path / name)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_bytes_and_missing_files_are_one_sentence(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "binary.txt", tmp_path / "missing.txt", tmp_path):
        done = check(file)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
    assert check().returncode == 2


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("==0.45.2", AFFECTED),
        ("==0.45.3", None),
        ("==0.43.0", AFFECTED),
        ("==0.42.0", None),
        ("==0.45.2+local", AFFECTED),
        ("===0.45.2", AFFECTED),
        ("==0.45.*", MAYBE),
        (">=0.45", MAYBE),
        ("", MAYBE),
        (">=0.45.3", None),
        ("~=0.45.1", MAYBE),
        ("<0.43", None),
        (">0.45.2,<0.45.3", None),
    ],
)
def test_pins_and_ranges(version, verdict):
    found = {finding.fix.id: finding.verdict for finding in findings({"bitsandbytes": version})}
    assert found.get(CODE) == verdict


def test_ranges_meet_or_not():
    assert overlap(">=1.0,<2.0", ">=1.9")
    assert overlap(">1.0", "<1.1")
    assert overlap("", "==3.*")
    assert overlap("!=1.5", ">=1.4,<=1.6")
    assert not overlap("<1.0", ">=1.0")
    assert not overlap("==1.5", "!=1.5")


def test_a_defect_that_is_mended_by_the_same_file_is_listed_and_no_failure():
    bare = check("-", stdin="bitsandbytes==0.45.2\n")
    assert bare.returncode == 1
    assert CODE in bare.stdout
    assert "bitsandbytes 0.45.3" in bare.stdout
    mended = check("-", "--json", stdin="bitsandbytes==0.45.2\ndiffusers_quantfix==0.1.0\n")
    found = json.loads(mended.stdout)
    assert mended.returncode == 0
    assert found["ok"]
    assert next(f for f in found["findings"] if f["id"] == CODE)["mended"]
    clean = check("-", stdin="numpy==2.0\n")
    assert (clean.returncode, clean.stdout.strip()) == (0, "no known defect in these versions")


def test_this_environment():
    done = check("--env", "--json")
    assert done.returncode in (0, 1)
    assert "packaging" in json.loads(done.stdout)["pins"]


def test_nothing_of_the_stack_is_imported(tmp_path):
    (tmp_path / "r.txt").write_text("bitsandbytes\ndiffusers\ntransformers\naccelerate\n")
    code = (
        "import sys; from diffusers_quantfix.__main__ import main; main(['check', sys.argv[1]]);"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'accelerate', 'bitsandbytes') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r.txt")], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
