"""The files of strangers: what is read, how much of it, and that nothing of it is quoted."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import pytest

from diffusers_quantfix.advisories.pins import Reading, UnreadableInput, files, read

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links and devices of POSIX")


def refusal(file: object, *, follow: bool = False) -> str:
    """The sentence with which a file is refused, within the time that a person waits."""
    started = time.perf_counter()
    with pytest.raises(UnreadableInput) as raised:
        read([str(file)], Reading(follow))
    assert time.perf_counter() - started < 60
    sentence = str(raised.value)
    assert sentence.isprintable() and len(sentence) < 500
    return sentence


@pytest.fixture
def project(tmp_path):
    """A repository with a folder of requirements, and a file beside the repository."""
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    (tmp_path / "repository" / "requirements").mkdir()
    (tmp_path / "secret.txt").write_text("bitsandbytes==0.45.2\nroot:x:0:0:hunter2\n")
    return tmp_path / "repository"


# All of these choices fit each other: put together they would be forty to the power of thirty.
CHOICES = "".join(
    f"[tool.poetry.group.g{group}.dependencies]\ntorch = '{' || '.join(f'>={group}.{n}' for n in range(40))}'\n"
    for group in range(30)
)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("pyproject.toml", "a = " + "[" * 90_000, "line 1 has more than 50 brackets inside each other"),
        ("pyproject.toml", "\na = " + "{a=" * 20_000, "line 2 has more than 50 brackets inside each other"),
        ("uv.lock", ".".join(["a"] * 40_000) + " = 1", "line 1 has a key of more than 50 parts"),
        ("uv.lock", "[" + ".".join(["a"] * 40_000) + "]", "line 1 has a key of more than 50 parts"),
        ("uv.lock", '"x' * 40_000 + "=1", "uv.lock is not valid TOML"),
        ("uv.lock", "a = 1" + "0" * 5000, "uv.lock is not valid TOML"),
        ("uv.lock", '"""\n' * 100_000, "uv.lock is not valid TOML"),
        ("pylock.toml", "[[packages]]\na=[]\n" * 200_001, "more than 500000 tables and lists"),
        ("r.txt", "torch==1" + "0" * 200_000, "line 1 has more than 100000 characters"),
        ("r.txt", "torch==1" + ",!=1.0" * 5000, "line 1 has a requirement of more than 4096 characters"),
        ("r.txt", "torch ; " + "(" * 4000 + "1", "line 1 is not a requirement (it begins with torch)"),
        ("r.txt", "numpy\n" * 500_001, "more than 500000 lines to read in all"),
        ("r.txt", "# comment\n" * 1_700_000, "more than 16 MB to read in all"),
        ("r.txt", "\n".join(f"torch>=1.{n}" for n in range(100_000)), "more than 50 different limits on torch"),
        ("r.txt", "torch" + ",".join(f">=1.{n}" for n in range(60)), "line 1: more than 50 different limits on torch"),
        ("pyproject.toml", CHOICES, "more than 50 different limits on torch"),
    ],
    ids=lambda value: str(value)[:20].strip(),
)  # fmt: skip
def test_too_much_is_refused_in_a_sentence(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    assert sentence in refusal(tmp_path / name)


def test_a_chain_of_three_thousand_files(tmp_path):
    for number in range(3000):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    (tmp_path / "3000.txt").write_text("torch\n")
    assert refusal(tmp_path / "0.txt").endswith("30.txt, line 1: files include each other more than 30 deep")


def test_a_thousand_files_beside_each_other(tmp_path):
    for number in range(1000):
        (tmp_path / f"{number}.txt").write_text("torch\n")
    (tmp_path / "r.txt").write_text("".join(f"-r {number}.txt\n" for number in range(1000)))
    assert refusal(tmp_path / "r.txt").endswith("r.txt, line 501: more than 500 files are included")


def test_it_stops_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_SECONDS", 0)
    (tmp_path / "r.txt").write_text("torch\n" * 1000)
    assert refusal(tmp_path / "r.txt").endswith("reading took more than 0 seconds, and was stopped")


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("kind", ["folder", "pipe", "zero", "null", "missing", "loop", "long", "nul"])
def test_what_is_no_file(tmp_path, kind, included):
    place = tmp_path / "place"
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":  # which nobody writes to: opening it would wait for ever
        os.mkfifo(place)
    elif kind in ("zero", "null"):
        place.symlink_to(f"/dev/{kind}")
    elif kind == "loop":
        place.symlink_to(place)
    name = {"long": "x" * 5000, "nul": "a\0b"}.get(kind, str(place))
    if kind == "nul" and included:
        pytest.skip("a text with a NUL is refused before")
    if included:
        (tmp_path / "r.txt").write_text(f"-r {name[:4000]}\n")
        sentence = refusal(tmp_path / "r.txt", follow=True)
        assert "r.txt, line 1: the file that it includes" in sentence
    elif kind == "long":
        with pytest.raises(UnreadableInput):
            read([name])
    else:
        sentence = refusal(name, follow=True)
        if kind in ("folder", "pipe", "zero", "null"):
            assert "is not a regular file" in sentence


@pytest.mark.parametrize("option", ["-r", "-c", "--requirement="])
def test_a_file_outside_the_project_is_not_read(project, option):
    (project / "requirements" / "base.txt").write_text("torch==2.6.0\n")
    (project / "r.txt").write_text(f"-r requirements/base.txt\n{option} ../secret.txt\n")
    assert refusal(project / "r.txt").endswith(
        "r.txt, line 2 points outside the project; --follow-outside reads it"
    )
    # a folder of the repository may reach the rest of it
    (project / "requirements" / "dev.txt").write_text("-r ../base.txt\n")
    (project / "base.txt").write_text("diffusers==0.33.1\n")
    assert read([str(project / "requirements" / "dev.txt")]).pins == {"diffusers": "==0.33.1"}


def test_a_file_that_is_no_requirements_file_is_not_quoted(project):
    (project / "r.txt").write_text("-r ../secret.txt\n")
    sentence = refusal(project / "r.txt", follow=True)
    assert sentence.endswith("secret.txt, line 2 is not a requirement")
    # nor inside of it: a checkout keeps its token in .git/config
    (project / ".git" / "config").write_text("[http]\n\textraheader = AUTHORIZATION: basic hunter2\n")
    (project / "r.txt").write_text("-r .git/config\n")
    assert refusal(project / "r.txt").endswith("config, line 1 is not a requirement")
    (project / "pyproject.toml").write_text('[project]\ndependencies = ["hunter2 hunter2"]\n')
    assert "hunter2" not in refusal(project / "pyproject.toml")
    (project / "pyproject.toml").write_text("a = {hunter2 = 1, hunter2 = 1}\n")
    assert "hunter2" not in refusal(project / "pyproject.toml")


@pytest.mark.parametrize("where", ["given", "included", "folder", "dynamic", "editable"])
def test_a_link_that_leads_outside(project, where):
    outside = project.parent / "outside"
    outside.mkdir()
    (outside / "r.txt").write_text("bitsandbytes==0.45.2\n")
    (outside / "pyproject.toml").write_text('[project]\ndependencies = ["bitsandbytes==0.45.2"]\n')
    (project / "link.txt").symlink_to(outside / "r.txt")
    (project / "folder").symlink_to(outside)
    given = project / "link.txt"
    if where != "given":
        given = project / ("pyproject.toml" if where == "dynamic" else "r.txt")
        given.write_text(
            {
                "included": "-r link.txt\n",
                "folder": "-c folder/r.txt\n",
                "editable": "-e folder\n",
                "dynamic": '[tool.setuptools.dynamic]\ndependencies = {file = "folder/r.txt"}\n',
            }[where]
        )
    followed = Reading(follow_outside=True)
    assert read([str(given)], followed).pins == {"bitsandbytes": "==0.45.2"}
    if where == "editable":  # it is installed from there, and what it demands is not known
        reading = read([str(given)])
        assert reading.pins == {}
        assert "outside the project" in reading.notes[0]
    else:
        assert "points outside the project" in refusal(given)


def test_a_constraint_that_is_also_a_requirement_is_both(tmp_path):
    (tmp_path / "x.txt").write_text("diffusers-quantfix\n")
    (tmp_path / "r.txt").write_text("-c x.txt\n-r x.txt\n")
    assert read([str(tmp_path / "r.txt")]).required == {"diffusers-quantfix"}


def test_names_are_printed_without_control_characters_and_commands(tmp_path):
    file = tmp_path / "a\x1b[31m\n::error::b ##[add-path]\udce9.txt"
    file.write_text("]")
    said = r"a\x1b[31m\n:\x3aerror:\x3ab #\x23[add-path]\udce9.txt, line 1 is not a requirement"
    assert refusal(file).endswith(said)


LINES = {
    "plain": "package{0}==1.{0}\n",
    "one package": "numpy>=1.{0}\n",
    "hashes": "package{0}==1.{0} --hash=sha256:{0:064}\n",
    "markers": "package{0}==1.{0} ; python_version >= '3.{1}' and sys_platform == 'linux'\n",
    "one library": "torch>=2.0\n",
    "comments": "# package{0}==1.{0}\n",
    "options": "--find-links folder{0}\n",
}


@pytest.mark.parametrize("kind", LINES)
def test_a_hundred_thousand_lines_take_a_second(tmp_path: pathlib.Path, kind):
    """Processor time: half of it here, on a machine that does other things as well."""
    file = tmp_path / "r.txt"
    file.write_text("torch==2.6.0\n" + "".join(LINES[kind].format(n, n % 12) for n in range(100_000)))
    started = time.process_time()
    read([str(file)])
    assert time.process_time() - started < 2


@pytest.mark.long
def test_a_hundred_thousand_notes_are_one(tmp_path):
    """The line of an entry of a project file has to be searched for."""
    entries = "".join(f"\"torch==1.{n} ; python_version < '3'\",\n" for n in range(100_000))
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = [\n{entries}]\n")
    started = time.process_time()
    notes = read([str(tmp_path / "pyproject.toml")]).notes
    assert time.process_time() - started < 20
    assert notes[0].endswith("pyproject.toml, line 3: torch was left out, its marker is false here")
    assert notes[1:] == ["99999 more notes of these kinds"]


@pytest.mark.parametrize("name", ["pyproject.toml", "poetry.toml", "uv.lock"])
def test_the_time_for_tables_grows_with_their_size(tmp_path: pathlib.Path, name):
    def took(count: int) -> float:
        if name == "pyproject.toml":
            entries = "".join(f'"package{n}==1.{n}",\n' for n in range(count))
            text = f"[project]\ndependencies = [\n{entries}]\n"
        elif name == "poetry.toml":
            text = "[tool.poetry.dependencies]\n" + "".join(f'package{n} = "^1.{n}"\n' for n in range(count))
        else:
            text = "".join(f'[[package]]\nname = "package{n}"\nversion = "1.{n}"\n' for n in range(count))
        (tmp_path / name).write_text(text)
        started = time.process_time()
        assert read([str(tmp_path / name)]).count == count
        return time.process_time() - started

    took(10)
    assert took(24_000) < 20 * took(3000)
