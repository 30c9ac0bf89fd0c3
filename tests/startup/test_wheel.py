"""The wheel in a fresh environment: an editable install is not what a user gets."""

from __future__ import annotations

import json
import pathlib
import tarfile
import zipfile

from packaging.requirements import Requirement

from tests.startup.conftest import ROOT, Environment, checked


def test_the_wheel_holds_the_package_and_the_start_up_files(wheel: pathlib.Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    startup = {f"diffusers_quantfix_startup{end}" for end in ("", ".pth", ".start")}
    assert tops == {"diffusers_quantfix", *startup}
    assert "diffusers_quantfix/py.typed" in names
    assert not any(name.startswith("diffusers_quantfix/startup") for name in names)
    assert not any(name.endswith(".md") for name in names), "the pages are for the repository"


def test_the_licence_is_in_the_wheel_and_in_the_source_archive(wheel: pathlib.Path, sdist: pathlib.Path):
    text = (ROOT / "diffusers_quantfix" / "LICENSE").read_bytes()
    assert text.lstrip().startswith(b"Apache License\n") and b"END OF TERMS AND CONDITIONS" in text
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("/METADATA"))
        ).decode()
        (name,) = (name for name in archive.namelist() if ".dist-info/licenses/" in name)
        assert archive.read(name) == text
    assert "License-Expression: Apache-2.0\nLicense-File: diffusers_quantfix/LICENSE\n" in metadata
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/diffusers_quantfix/LICENSE")
        assert member is not None and member.read() == text
    assert top - {".gitignore", "PKG-INFO"} == {
        "pyproject.toml", "diffusers_quantfix", "tests", "CHANGELOG.md", "README.md",
    }  # fmt: skip


def test_only_small_packages_are_required(wheel: pathlib.Path):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert sorted(Requirement(line.partition(":")[2]).name for line in required) == ["packaging", "wrapt"]
    assert "Requires-Python: >=3.10" in metadata


def test_without_any_library_every_fix_is_missing(environment: Environment):
    done = checked(environment.run("-m", "diffusers_quantfix", "status", "--json"))
    states = {fix["id"]: fix["state"] for fix in json.loads(done.stdout)["fixes"]}
    assert states and set(states.values()) == {"missing"}


def test_the_rig_is_not_in_the_wheel_and_verify_knows_it(environment: Environment):
    program = "from diffusers_quantfix.verify import rig; print(rig.is_here(), rig.advice(2, False, ''))"
    done = checked(environment.run("-c", program))
    assert done.stdout.startswith("False 2 bugs need a CUDA device: run this where there is one, or ")
    assert "in a clone of the repository" in done.stdout


def test_uninstalling_leaves_nothing(own_environment: Environment):
    checked(own_environment.run("-m", "diffusers_quantfix", "enable"))
    checked(own_environment.pip("uninstall", "-y", "diffusers-quantfix"))
    assert list(own_environment.site.rglob("*quantfix*")) == []
    assert own_environment.run("-c", "pass").stderr == ""
