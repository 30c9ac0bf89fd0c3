"""Version claims: development, local and post versions, several distributions, bad metadata."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import types

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from diffusers_quantfix.engine import versions
from diffusers_quantfix.engine.versions import contains, installed_version, judge

FITS = {
    "<0.36": [
        "0.35.2",
        "0.36.0.dev0",
        "0.36.0rc1",
        "0.36.0.dev0+g1a2b3c",
        "0.35.2+cu121",
        "0.35.2.post1",
        "0",
    ],
    ">=0.36": [
        "0.36.0",
        "0.36.0.dev0",
        "0.36.0rc1",
        "0.36.0.dev0+g1a2b3c",
        "0.36.0.post1",
        "1!0.1",
        "0.36.0+local",
    ],
    ">=0.33,<0.36": ["0.33.0", "0.33.0.dev0", "0.36.0.dev0", "0.35.9"],
    ">=0.31.0,<=0.33.1": ["0.31.0.dev0", "0.33.1", "0.33.1+cu121", "0.33.1rc1"],
    "==0.33.1": ["0.33.1", "0.33.1+git", "0.33.1.dev0"],
    "==0.33.*": ["0.33.0", "0.33.1.dev0", "0.33.0rc1"],
    "!=0.34.0": ["0.33.0", "0.34.1", "0.34.0.dev0"],
    "~=0.33.1": ["0.33.1", "0.33.9"],
    ">0.33": ["0.33.1", "0.34.0.dev0"],
    "": ["0.1", "2.0.dev0"],
}
OUTSIDE = {
    "<0.36": ["0.36.0", "0.36.0.post1", "0.36.0+cu121", "0.36.1.dev0", "0.37.0.dev0"],
    ">=0.36": [
        "0.35.2",
        "0.35.2.post1",
        "0.35.9.dev1",
        "0.36a0.dev0.post1".replace(".post1", "") and "0.35.0rc1",
    ],
    ">=0.33,<0.36": ["0.32.2", "0.36.0", "0.32.9.dev0", "0.36.1rc1"],
    ">=0.31.0,<=0.33.1": ["0.33.2", "0.33.1.post1", "0.34.0.dev0", "0.30.3"],
    "==0.33.1": ["0.33.0", "0.33.1.post1"],
    "!=0.34.0": ["0.34.0", "0.34.0+cu121"],
    "~=0.33.1": ["0.34.0", "0.33.0"],
    ">0.33": ["0.33", "0.33+cu121", "0.32"],
}


@pytest.mark.parametrize("specifier", FITS)
def test_contains(specifier) -> None:
    assert [version for version in FITS[specifier] if not contains(specifier, version)] == []
    assert [version for version in OUTSIDE.get(specifier, ()) if contains(specifier, version)] == []


def test_final_releases_are_compared_as_packaging_compares_them() -> None:
    """Most answers are found without `packaging.specifiers`, which nothing else imports."""
    bounds = [
        f"{sign}{bound}" for sign in (">=", "<=", "<") for bound in ("0.33", "0.33.0", "0.33.1", "0.36", "10")
    ]
    specifiers = ["", *bounds, *map(",".join, itertools.permutations(bounds, 2))]
    releases = [
        "0",
        "0.9",
        "0.33",
        "0.33.0.0",
        "0.33.1",
        "0.33.1.post1",
        "0.36.0+cu121",
        "0.36.post2",
        "1!0.1",
    ]
    assert all(versions._plain_bounds(specifier) is not None for specifier in specifiers)
    for specifier, release in itertools.product(specifiers, releases):
        expected = [part.operator for part in SpecifierSet(specifier) if not part.contains(release)]
        assert sorted(versions._against(specifier, Version(release))) == sorted(expected), (
            specifier,
            release,
        )
    for specifier in (
        "==0.33.1",
        "!=0.34",
        "~=0.33.1",
        ">0.33",
        "==0.33.*",
        ">=0.33 ,<1",
        ">=0.33rc1",
        "<1,",
    ):
        assert versions._plain_bounds(specifier) is None


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts the metadata of a distribution on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, metadata: str | None) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-0.dist-info"
        folder.mkdir()
        if metadata is not None:
            (folder / "METADATA").write_text(metadata)

    return write


def version(number: str, name: str = "x") -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"


def test_all_distributions_of_a_claim_must_fit(install) -> None:
    install("fake-one", version("1.5", "fake-one"))
    install("fake-two", version("2.0.dev3+cu121", "fake-two"))
    for claims, kind, reason in [
        ({"fake-one": "<2"}, "fits", "fake-one 1.5"),
        ({"fake-one": "<2", "fake-two": ">=2"}, "fits", "fake-one 1.5, fake-two 2.0.dev3+cu121"),
        ({"fake-one": ">=2", "fake-two": "<3"}, "out-of-range", "fake-one 1.5 is outside >=2"),
        (
            {"fake-one": ">=2", "fake-two": "<1"},
            "out-of-range",
            "fake-one 1.5 is outside >=2 and fake-two 2.0.dev3+cu121 is outside <1",
        ),
        ({"fake-one": ">=2", "fake-three": "<3"}, "missing", "fake-three is not installed"),
        ({"Fake_One": "<2"}, "fits", "Fake_One 1.5"),
    ]:
        verdict = judge(claims)
        assert (verdict.kind, verdict.reason, verdict.fits) == (kind, reason, kind == "fits")


@pytest.mark.parametrize(
    ("metadata", "stated"),
    [
        (version("not.a.version"), "not.a.version"),
        ("Metadata-Version: 2.1\nName: x\n", ""),
        (version(""), ""),
        ("", ""),
        ("\x00\x01garbage", ""),
    ],
)
def test_corrupt_metadata(install, metadata, stated) -> None:
    install("fake-bad", metadata)
    assert installed_version("fake-bad") == stated
    verdict = judge({"fake-bad": "<2"})
    assert (verdict.kind, verdict.reason) == (
        "unreadable",
        f"fake-bad states the version {stated!r}, which is not valid; reinstall fake-bad",
    )


HEADERS = {
    "in another place": "Metadata-Version: 2.1\nVersion: 1.0\nName: x\n",
    "in small letters": "metadata-version: 2.1\nname: x\nversion: 1.0\n",
    "twice": "Metadata-Version: 2.1\nVersion: 1.0\nVersion: 2.0\n",
    "after a folded line": "Metadata-Version: 2.1\nSummary: a\n  Version: 3.0\nVersion: 1.0\n",
    "in the description": "Metadata-Version: 2.1\nName: x\n\nVersion: 1.0\n",
    "after a line that is no header": "Metadata-Version: 2.1\nno header\nVersion: 1.0\n",
    "after an empty line": "\nVersion: 1.0\n",
    "late": "Metadata-Version: 2.1\n" + "Classifier: a\n" * 20 + "Version: 1.0\n",
    "with carriage returns": "Metadata-Version: 2.1\r\nVersion: 1.0\r\n",
    "with spaces": "Metadata-Version: 2.1\nVersion:   1.0  \n",
}


@pytest.mark.parametrize("where", HEADERS)
def test_the_version_is_read_as_the_standard_library_reads_it(install, where) -> None:
    install("fake-read", HEADERS[where])
    try:
        expected = importlib.metadata.Distribution.from_name("fake-read").version or ""
    except KeyError:  # Python 3.12 and later, without a Version line
        expected = ""
    assert installed_version("fake-read") == expected


def test_a_folder_without_metadata_has_no_valid_version(install) -> None:
    install("fake-empty", None)
    assert installed_version("fake-empty") in (None, "")
    assert judge({"fake-empty": "<2"}).kind in ("missing", "unreadable")


def _package(folder, name: str, text: str) -> None:
    home = folder.joinpath(*name.split("."))
    home.mkdir(parents=True)
    (home / "__init__.py").write_text(text)


@pytest.mark.parametrize("name", ["fakevendored", "fake.inner", "fake_under"])
def test_without_metadata_the_module_states_the_version(tmp_path, monkeypatch, name) -> None:
    """In the middle of its import, too: its submodules are there before its own last line."""
    distribution = name.replace(".", "-").replace("_", "-")
    during = "from diffusers_quantfix.engine.versions import installed_version\n"
    during += f"during = installed_version({distribution!r})\n"
    _package(tmp_path, name, f"{during}__version__ = '1.5'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version(distribution) == "1.5", "before its import"
    assert not {name, name.partition(".")[0]} & sys.modules.keys()
    module = importlib.import_module(name)
    assert (module.during, installed_version(distribution)) == ("1.5", "1.5")
    assert judge({distribution: "<2"}).fits
    module.__version__ = "2.5"
    assert judge({distribution: "<2"}).kind == "out-of-range"


def test_a_module_without_any_version(tmp_path, monkeypatch) -> None:
    _package(tmp_path, "fakesilent", "")
    (tmp_path / "fakefolder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (judge({"fakesilent": ""}).kind, judge({"fakesilent": ""}).reason) == ("fits", "fakesilent")
    assert judge({"fakesilent": "<2"}).kind == "unreadable"
    assert judge({"fakefolder": ""}).kind == "missing", "a folder is no package"
    monkeypatch.setitem(sys.modules, "fakestub", types.ModuleType("fakestub"))
    assert judge({"fakestub": ""}).kind == "missing", "a stand-in says that it is not there"
