"""Reading what people have: every kind of file that `check` takes, and what it says of one that is broken."""

from __future__ import annotations

import graphlib
import io
import pathlib
import subprocess
import sys

import pytest

from diffusers_quantfix.advisories.pins import Reading, UnreadableInput, read
from diffusers_quantfix.advisories.ranges import both, inside, overlap
from tests.engine.test_shape import PACKAGE, imports, name_of


def reading_of(tmp_path: pathlib.Path, name: str, text: str | bytes) -> Reading:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read([str(file)])


REQUIREMENTS = """\
# comment
--index-url https://example.invalid/simple
--requirement=more.txt
bitsandbytes == 0.45.2 \\
    --hash=sha256:abc \\
    --hash=sha256:def
diffusers[torch]==0.33.1  # why
transformers==4.51.3; python_version >= "3.8"
accelerate==0.1; python_version < "3.8"
-e git+https://example.invalid/peft.git#egg=peft
https://example.invalid/torch-2.6.0%2Bcu124-cp311-cp311-linux_x86_64.whl
gguf @ https://example.invalid/gguf-0.10.0-py3-none-any.whl
optimum-quanto@git+https://example.invalid/quanto@v0.2.7
./wheels/torchao-0.9.0-py3-none-any.whl
sdists/wrapt-2.0.0.tar.gz
"""


def test_a_requirements_file(tmp_path):
    (tmp_path / "more.txt").write_text("-c limits.txt\n-r requirements.txt\naccelerate>=1.0\n")
    (tmp_path / "limits.txt").write_text("accelerate<1.7\npackaging<30\nnumpy<3\n")
    found = reading_of(tmp_path, "requirements.txt", REQUIREMENTS)
    assert found.pins == {
        "accelerate": "<1.7,>=1.0",
        "packaging": "<30",
        "torchao": "==0.9.0",
        "bitsandbytes": "==0.45.2",
        "diffusers": "==0.33.1",
        "transformers": "==4.51.3",
        "peft": "",
        "torch": "==2.6.0+cu124",
        "gguf": "==0.10.0",
        "optimum-quanto": "",
        "wrapt": "==2.0.0",
    }
    assert found.required == set(found.pins) - {"packaging"}, "a constraint demands nothing"
    (note,) = found.notes
    assert note.endswith("requirements.txt, line 9: accelerate was left out, its marker is false here")
    assert found.count == 14, "numpy, what was left out and what has no advisory included"
    assert not found.complete


@pytest.mark.parametrize("space", [" ", "\t", "  \t "])
def test_a_comment_begins_after_any_white_space(tmp_path, space):
    found = reading_of(tmp_path, "requirements.txt", f"bitsandbytes==0.45.2{space}# why\n{space}# more\n")
    assert found.pins == {"bitsandbytes": "==0.45.2"}


def test_variables_of_the_environment_in_paths_as_pip_reads_them(tmp_path, monkeypatch):
    monkeypatch.setenv("QF_FOLDER_1", "sub")
    monkeypatch.setenv("qf_lower", "sub")
    monkeypatch.setenv("QF_EMPTY", "")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.txt").write_text("diffusers==0.33.1\n")
    text = "-r ${QF_FOLDER_1}/x.txt\nbitsandbytes==0.45.2\n"
    assert reading_of(tmp_path, "requirements.txt", text).pins == {
        "diffusers": "==0.33.1",
        "bitsandbytes": "==0.45.2",
    }
    for written in ("${qf_lower}/x.txt", "$QF_FOLDER_1/x.txt", "${QF_EMPTY}sub/x.txt", "${QF_UNSET}/x.txt"):
        with pytest.raises(UnreadableInput, match="line 1: the file that it includes: No such file"):
            reading_of(tmp_path, "requirements.txt", f"-r {written}\n")


def test_a_version_in_a_variable_is_not_read(tmp_path, monkeypatch):
    """A stranger's line may put any variable behind the name of a library, and versions are printed."""
    monkeypatch.setenv("QF_SECRET", "0.45.2+hunter2")
    text = "bitsandbytes==${QF_SECRET}\ntorch===${QF_SECRET} ; python_version >= '3'\n"
    found = reading_of(tmp_path, "requirements.txt", text)
    assert found.pins == {"bitsandbytes": "", "torch": ""}
    assert [note.partition(": ")[2] for note in found.notes] == [
        "the version of bitsandbytes is a variable, and variables are not expanded",
        "the version of torch cannot be compared",
    ]


def test_a_marker_is_not_compared_with_the_environment(tmp_path, monkeypatch):
    """A hundred thousand such lines would tell a secret bit by bit."""
    monkeypatch.setenv("QF_SECRET", "hunter2")
    for other in ("hunter2", "other"):
        found = reading_of(tmp_path, "r.txt", f"torch==1 ; '${{QF_SECRET}}' == '{other}'\n")
        assert (found.pins, found.notes) == ({"torch": "==1"}, [])


@pytest.mark.parametrize(
    "line",
    [
        "-r ${QF_SECRET}/x.txt",
        "-r https://${QF_SECRET}/x.txt",
        "]${QF_SECRET}[",
        "${QF_SECRET}",
        "-c ${QF_SECRET}",
    ],
)
def test_the_value_of_a_variable_is_not_told(tmp_path, monkeypatch, line):
    monkeypatch.setenv("QF_SECRET", "hunter2")
    with pytest.raises(UnreadableInput) as raised:
        reading_of(tmp_path, "requirements.txt", line)
    assert "line 1" in str(raised.value) and "hunter2" not in str(raised.value)


def test_nor_is_it_in_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("QF_SECRET", "hunter2")
    text = "https://${QF_SECRET}/x\n./${QF_SECRET}\n-e ${QF_SECRET}\ntorch==${QF_SECRET}\n"
    notes = reading_of(tmp_path, "requirements.txt", text).notes
    assert len(notes) == 4
    assert not any("hunter2" in note for note in notes)


def test_a_closed_standard_input_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UnreadableInput, match="standard input is closed"):
        read(["-"])


FREEZE = """\
diffusers @ file:///home/me/diffusers
torch==2.6.0+cu124
# Editable install with no version control (diffusers-quantfix==0.1.0)
-e /home/me/diffusers_quantfix
# Editable Git install with no remote (peft==0.15.2)
-e /home/me/peft
-e git+https://github.com/huggingface/accelerate@0123abc#egg=accelerate
"""


def test_pip_freeze(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FREEZE.encode())))
    assert read(["-"]).pins == {
        "diffusers": "",
        "torch": "==2.6.0+cu124",
        "diffusers-quantfix": "==0.1.0",
        "peft": "==0.15.2",
        "accelerate": "",
    }


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_windows_writes(tmp_path, encoding):
    text = "bitsandbytes==0.45.2\r\ndiffusers==0.33.1\r\n"
    found = reading_of(tmp_path, "requirements.txt", text.encode(encoding))
    assert found.pins == {"bitsandbytes": "==0.45.2", "diffusers": "==0.33.1"}


def test_an_editable_project_of_this_machine_says_what_it_demands(tmp_path):
    text = """
[project]
name = "app"
version = "1.2"
dependencies = ["diffusers==0.33.1"]
[project.optional-dependencies]
quant = ["bitsandbytes==0.45.2"]
other = ["torchao"]
"""
    (tmp_path / "pyproject.toml").write_text(text)
    found = reading_of(tmp_path, "r.txt", "-e .[quant]\n-e ./nowhere\n")
    assert found.pins == {"diffusers": "==0.33.1", "bitsandbytes": "==0.45.2"}
    assert [
        note.endswith("r.txt, line 2: the folder has no pyproject.toml; what it requires is unknown")
        for note in found.notes
    ] == [True]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "fine\n\n]broken[\n", "a.txt, line 3"),
        (
            "a.txt",
            "fine \\\n --hash=x\nbitsandbytes=0.45\n",
            "a.txt, line 3 is not a requirement \\(it begins with bitsandbytes\\)",
        ),
        ("b.txt", "-r nowhere.txt\n", "b.txt, line 1: the file that it includes: No such file"),
        ("b.txt", "numpy\n-r https://example.invalid/r.txt\n", "b.txt, line 2.*nothing is fetched"),
        ("c.toml", "[project\n", "c.toml is not valid TOML \\(at line 1"),
        ("uv.lock", 'package = "x"\n', "no \\[\\[package\\]\\] tables"),
        ("uv.lock", "version = 1\n", "no \\[\\[package\\]\\] tables"),
        ("d.toml", '[project]\ndependencies = [\n"a b c"]\n', "d.toml, line 3 is not a requirement$"),
        ("e.toml", '[project]\ndependencies = "numpy"\n', "project.dependencies is not a list"),
        (
            "e.toml",
            "[project]\ndependencies = [3]\n",
            "project.dependencies holds something that is not a requirement",
        ),
        ("e.toml", 'project = "x"\n', "project is not a table"),
        (
            "f.toml",
            '[tool.poetry.dependencies]\nnumpy = "1"\ntorch = "^x"\n',
            "f.toml, line 3 is not a poetry constraint",
        ),
        ("f.toml", "[tool.poetry.dependencies]\ntorch = 2\n", "f.toml, line 2 is not a poetry constraint"),
        (
            "f.toml",
            '[tool.poetry.dependencies]\ntorch = {version = "1", python = "^x"}\n',
            "f.toml, line 2: the marker of torch is invalid",
        ),
        (
            "poetry.lock",
            '[[package]]\nname = "torch"\nmarkers = "no marker"\n',
            "poetry.lock, line 1: the marker of torch is invalid",
        ),
        (
            "poetry.lock",
            '[[package]]\nname = "torch"\nmarkers = 3\n',
            "poetry.lock, line 1 has an invalid marker",
        ),
        ("environment.yml", "name: x\n", "an unsupported kind of file; supported are requirements"),
        ("Pipfile.lock", "{}", "an unsupported kind of file"),
        ("uv.lock", "[[package]]\nversion = '1'\n", "uv.lock, line 1 is a package without a name"),
        ("g.txt", b"torch==1\0\n", "not text: it has NUL"),
        ("g.txt", "torch==1".encode("utf-32"), "not text: it has NUL"),
        ("g.txt", b"\xff\xfet", "not UTF-8 text"),
        ("g.txt", b"\xff\xff\x00", "not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_names_the_file_and_the_line(tmp_path, name, text, sentence):
    with pytest.raises(UnreadableInput, match=sentence):
        reading_of(tmp_path, name, text)


@pytest.mark.parametrize("name", ["broken.txt", "missing.txt", "."])
def test_the_command_says_it_in_one_line_and_exits_with_2(tmp_path, name):
    (tmp_path / "broken.txt").write_text("]broken[\n")
    command = [sys.executable, "-m", "diffusers_quantfix", "check", str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1


def test_ranges_meet_or_not():
    assert overlap(">=1.0,<2.0", ">=1.9")
    assert overlap(">1.0", "<1.1")
    assert overlap("", "==3.*")
    assert overlap("!=1.5", ">=1.4,<=1.6")
    assert not overlap("<1.0", ">=1.0")
    assert not overlap("==1.5", "!=1.5")
    assert overlap(">1.2.3.4", "<1.2.3.6") and not overlap(">1.2.3", "<1.2.4")
    assert overlap(">1!1.0", "<1!2") and not overlap(">1!1.0", "<2")
    assert overlap(">1.0rc1", "<1.0")
    assert not overlap(">1.0", "<=1.0")
    assert overlap("===weird", "") and not overlap("===weird", ">=1")


def test_demands_hold_together_or_leave_a_choice():
    assert both("", "==1.0") == "==1.0"
    assert both(">=1", "<2") == ">=1,<2"
    assert both("==1.0", "==2.0") == "==1.0 || ==2.0"
    assert both("==1.0 || ==2.0", ">=1.5") == "==2.0,>=1.5"


@pytest.mark.parametrize(
    ("claim", "pin", "answer"),
    [
        (">=1,<2", "==1.5", "yes"),
        (">=1,<2", "==2.0", ""),
        (">=1,<2", ">=1.9", "perhaps"),
        (">=1,<2", "==1.5 || ==2.0", "perhaps"),
        (">=1,<2", "==1.5 || ==1.6", "yes"),
        (">=1,<2", ">=1.1,<2", "yes"),
        (">=1,<=2", ">=1,<=2", "yes"),
        (">=1,<2", ">=1.1,<=2", "perhaps"),
        (">=1,<2", ">=2", ""),
        (">=1", "~=1.2.3", "yes"),
        ("~=1.2", ">=1.2,<2", "perhaps"),
        ("!=1.5", ">=1,<2", "perhaps"),
        ("", "", "yes"),
        (">=1", "===weird", "perhaps"),
    ],
)
def test_inside(claim, pin, answer):
    assert inside(claim, pin) == answer


def test_what_reads_has_no_circle_of_imports():
    """Imports inside functions count: the reader of projects is handed the reader of requirements files."""
    found = {name_of(path): imports(path) for path in (PACKAGE / "advisories").rglob("*.py")}
    graphlib.TopologicalSorter({name: wanted - {name} for name, wanted in found.items()}).prepare()
