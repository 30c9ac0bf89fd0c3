"""Project files and lock files: what they pin, and what of it is for the running Python."""

from __future__ import annotations

import sys

import pytest

from diffusers_quantfix.advisories.pins.project import from_poetry
from tests.tools.test_pins import reading_of

PYPROJECT = """
[project]
name = "app"
dependencies = ["bitsandbytes>=0.44", "Diffusers==0.33.1"]
[project.optional-dependencies]
fast = ["accelerate==1.6.0"]
slow = ["accelerate==1.7.0"]
[dependency-groups]
dev = ["peft", {include-group = "test"}]
test = ["pytest"]
[tool.uv]
constraint-dependencies = ["bitsandbytes<0.46", "packaging<30", "numpy<3"]
[tool.poetry.dependencies]
python = "^3.11"
torch = "^2.4"
transformers = {version = "~4.51.3", extras = ["x"]}
gguf = "0.10.0"
wrapt = [
    {version = "<1.17", python = "<3.9"},
    {version = "^2.0", python = ">=3.9"},
]
torchao = {git = "https://example.invalid/ao.git"}
accelerate = {version = "1.0", markers = "sys_platform == 'other'"}
diffusers-quantfix = {version = "0.5", markers = "extra == 'quant' and extra != 'other'"}
[tool.poetry.group.dev.dependencies]
optimum-quanto = ">=0.2.5 <0.2.7 || 0.2.7"
"""


def test_a_project_file(tmp_path):
    found = reading_of(tmp_path, "pyproject.toml", PYPROJECT)
    assert found.pins == {
        "bitsandbytes": ">=0.44,<0.46",
        "diffusers": "==0.33.1",
        "accelerate": "==1.6.0 || ==1.7.0",  # extras that contradict each other
        "peft": "",
        "packaging": "<30",
        "torch": ">=2.4,<3",
        "transformers": "~=4.51.3",
        "gguf": "==0.10.0",
        "wrapt": ">=2.0,<3",
        "torchao": "",
        "diffusers-quantfix": "==0.5",
        "optimum-quanto": ">=0.2.5,<0.2.7 || ==0.2.7",
    }
    assert "packaging" not in found.required
    left_out = [note.partition(": ")[2] for note in found.notes]
    assert left_out == [f"{name} was left out, its marker is false here" for name in ("wrapt", "accelerate")]


HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("python", "here"),
    [
        ("*", True),
        (f"^{HERE}", True),
        (f"~{HERE}", True),
        (HERE, True),  # every patch release of it, as poetry reads it
        (f"<={HERE}", True),
        (f">{HERE}", False),
        (f"<{HERE}", False),
        ("<3", False),
        (f"<3 || >={HERE}", True),
        ("~3.1 || ~3.2", False),
        (f">={HERE}.0 <4", True),
        (f"<{HERE}.0", False),
    ],
)
def test_the_python_of_a_dependency_of_poetry(tmp_path, python, here):
    text = f'[tool.poetry.dependencies]\ntransformers = {{version = "4.51.3", python = "{python}"}}\n'
    found = reading_of(tmp_path, "pyproject.toml", text)
    assert found.pins == ({"transformers": "==4.51.3"} if here else {})
    said = "pyproject.toml, line 2: transformers was left out, its marker is false here"
    assert [note.endswith(said) for note in found.notes] == ([] if here else [True])


def test_dependencies_that_stand_elsewhere(tmp_path):
    (tmp_path / "requirements.txt").write_text("bitsandbytes==0.45.2\n")
    text = '[project]\ndynamic = ["dependencies"]\n'
    (note,) = [n for n in reading_of(tmp_path, "pyproject.toml", text).notes if "dynamic" in n]
    assert "check the file they come from" in note
    text += '[tool.setuptools.dynamic]\ndependencies = {file = ["requirements.txt"]}\n'
    assert reading_of(tmp_path, "pyproject.toml", text).pins == {"bitsandbytes": "==0.45.2"}
    assert any("lists no dependencies" in note for note in reading_of(tmp_path, "pyproject.toml", "").notes)


@pytest.mark.parametrize(
    ("constraint", "specifier"),
    [
        ("^1.2.3", ">=1.2.3,<2"),
        ("^0.33.1", ">=0.33.1,<0.34"),
        ("^0.0.3", ">=0.0.3,<0.0.4"),
        ("^0.0", ">=0.0,<0.1"),
        ("^0", ">=0,<1"),
        ("~1.2.3", "~=1.2.3"),
        ("~1.2", "==1.2.*"),
        ("~1", "==1.*"),
        ("1.2.*", "==1.2.*"),
        ("*", ""),
        ("1.2", "==1.2"),
        ("=1.2", "==1.2"),
        (">= 1.2, < 2", ">=1.2,<2"),
        (">=1.2 <2", ">=1.2,<2"),
        ("!=1.3", "!=1.3"),
    ],
)
def test_the_constraints_of_poetry(constraint, specifier):
    assert from_poetry(constraint) == specifier


@pytest.mark.parametrize(
    ("name", "table"), [("uv.lock", "package"), ("poetry.lock", "package"), ("pylock.toml", "packages")]
)
def test_a_lock_file(tmp_path, name, table):
    text = f"""version = 1
[[{table}]]
name = "Optimum_Quanto"
version = "0.45.2"
[[{table}]]
name = "torch"
version = "2.6.0"
[[{table}]]
name = "torch"
version = "2.6.0+cu124"
[[{table}]]
name = "peft"
source = {{ editable = "." }}
"""
    found = reading_of(tmp_path, name, text)
    assert found.pins == {"optimum-quanto": "==0.45.2", "torch": "==2.6.0 || ==2.6.0+cu124", "peft": ""}
    assert found.complete


OTHER = "sys_platform == 'other'"


@pytest.mark.parametrize(
    ("name", "table", "marker"),
    [
        ("pylock.toml", "packages", f'marker = "{OTHER}"'),
        ("poetry.lock", "package", f'markers = "{OTHER}"'),
        ("poetry.lock", "package", f"""markers = {{main = "{OTHER}", dev = "python_version < '3'"}}"""),
        ("uv.lock", "package", f"""resolution-markers = ["{OTHER}", "python_version < '3'"]"""),
        ("pylock.toml", "packages", f"""marker = "{OTHER} and 'cuda' in extras\""""),
    ],
)
def test_a_locked_package_that_is_not_for_this_python_is_left_out_and_said(tmp_path, name, table, marker):
    text = f"""[[{table}]]
name = "torch"
version = "2.6.0"
[[{table}]]
name = "torch"
version = "2.7.0"
{marker}
"""
    found = reading_of(tmp_path, name, text)
    assert found.pins == {"torch": "==2.6.0"}
    (note,) = found.notes
    assert note.endswith(f"{name}, line 4: torch was left out, its marker is false here")


@pytest.mark.parametrize(
    ("name", "table", "marker"),
    [
        ("pylock.toml", "packages", """marker = "python_version >= '3'\""""),
        ("pylock.toml", "packages", """marker = "'cuda' in extras or 'dev' in dependency_groups\""""),
        ("pylock.toml", "packages", """marker = "'cpu' not in extras\""""),
        ("poetry.lock", "package", """markers = 'extra == "quant"'"""),
        ("poetry.lock", "package", f"""markers = {{main = "{OTHER}", dev = "python_version >= '3'"}}"""),
        ("uv.lock", "package", f"""resolution-markers = ["{OTHER}", "extra == 'extra-3-app-cu124'"]"""),
        ("uv.lock", "package", "resolution-markers = []"),
        ("poetry.lock", "package", f"""groups = ["main", "dev"]\nmarkers = {{dev = "{OTHER}"}}"""),
    ],
)
def test_all_extras_and_groups_of_a_lock_file_count(tmp_path, name, table, marker):
    text = f'[[{table}]]\nname = "torch"\nversion = "2.6.0"\n{marker}\n'
    found = reading_of(tmp_path, name, text)
    assert (found.pins, found.notes) == ({"torch": "==2.6.0"}, [])
