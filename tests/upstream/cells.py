"""Reads `cells.toml`: the pinned release sets, and the releases that each library has."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import tomllib
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

TABLE = Path(__file__).with_name("cells.toml")
MAIN = ("diffusers", "transformers", "accelerate", "bitsandbytes")
_NOT_PINS = {"name", "ci", "note", "python"}


@dataclass(frozen=True)
class Cell:
    """One release set.

    Attributes:
        name: as it is selected and reported.
        python: "3.11".
        pins: distribution -> release; an empty release means the newest that the others allow.
        ci: whether CI covers it.
        note: why it is here.
        alone: the distribution that this cell has on its own, of a range; empty for a full set.
    """

    name: str
    python: str
    pins: dict[str, str]
    ci: bool = False
    note: str = ""
    alone: str = ""

    @property
    def requirements(self) -> list[str]:
        """What is installed, as requirement lines."""
        return sorted(f"{name}=={release}" if release else name for name, release in self.pins.items())

    @property
    def key(self) -> str:
        """Equal for cells whose environments are the same."""
        return digest([self.python, self.requirements, bool(self.alone)])

    @property
    def title(self) -> str:
        """The releases that differ between cells, for people."""
        names = [self.alone] if self.alone else [*MAIN, *sorted(self.extra)]
        return ", ".join(f"{name} {self.pins[name]}" for name in names if name in self.pins)

    @property
    def extra(self) -> list[str]:
        """Libraries that this row has beside the four of every row."""
        return [name for name in self.pins if name in ("optimum-quanto", "torchao")]


@dataclass(frozen=True)
class Table:
    """All of `cells.toml`; ``python`` and ``torch`` are those of the sets that name none."""

    python: str
    torch: str
    shared: dict[str, str]
    releases: dict[str, list[str]]
    cells: list[Cell]
    ranges: list[Cell] = field(default_factory=list)

    @property
    def every(self) -> list[Cell]:
        return [*self.cells, *self.ranges]

    @property
    def known(self) -> dict[str, list[str]]:
        """What a claim may bound: the releases of each library, and every torch that a set has, ascending."""
        return {**self.releases, "torch": self.torches}

    @property
    def pythons(self) -> list[str]:
        """Every Python that a set has, ascending."""
        return sorted({cell.python for cell in self.every}, key=Version)

    @property
    def torches(self) -> list[str]:
        """Every torch that a set has, ascending."""
        return sorted({cell.pins["torch"] for cell in self.every}, key=Version)

    def select(self, words: list[str]) -> list[Cell]:
        """The cells that ``ci``, ``all`` (ranges included), ``ranges`` or names mean, in the order of the table.

        Raises:
            ValueError: a word is none of these.
        """
        groups = {"ci": [cell for cell in self.cells if cell.ci], "all": self.every, "ranges": self.ranges}
        wanted: set[str] = set()
        for word in words:
            if word in groups:
                found = groups[word]
            else:
                found = [cell for cell in self.every if cell.name == word]
                if not found:
                    names = ", ".join(cell.name for cell in [*self.cells, *self.ranges[:1]])
                    raise ValueError(f"no cell is called {word!r}; there are ci, all, ranges, {names} ...")
            wanted.update(cell.name for cell in found)
        return [cell for cell in self.every if cell.name in wanted]


def read(path: Path = TABLE) -> Table:
    """Parse the table.

    Raises:
        ValueError: a row lacks its name or a library, a name stands twice, a release is not in ``[releases]``.
    """
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = {canonicalize_name(name): release for name, release in raw["shared"].items()}
    releases = {name: sorted(found, key=Version) for name, found in raw["releases"].items()}
    cells = [_cell(row, raw, shared) for row in raw["cell"]]
    ranges = [cell for row in raw.get("range", ()) for cell in _range(row, raw, shared, releases)]
    table = Table(raw["python"], raw["torch"], shared, releases, cells, ranges)
    seen: set[str] = set()
    for cell in table.every:
        if cell.name in seen:
            raise ValueError(f"two cells are called {cell.name}")
        seen.add(cell.name)
        for name, known in releases.items():
            if name in cell.pins and cell.pins[name] not in known:
                raise ValueError(f"cell {cell.name}: {name} {cell.pins[name]} is not in [releases]")
    return table


def _cell(row: dict, raw: dict, shared: dict[str, str]) -> Cell:
    for needed in ("name", *MAIN):
        if needed not in row:
            raise ValueError(f"the cell {row.get('name', row)} does not say its {needed}")
    own = {canonicalize_name(key): value for key, value in row.items() if key not in _NOT_PINS}
    pins = {"torch": raw["torch"], **shared, **own}
    return Cell(row["name"], row.get("python", raw["python"]), pins, bool(row.get("ci")), row.get("note", ""))


def _range(row: dict, raw: dict, shared: dict[str, str], releases: dict[str, list[str]]) -> list[Cell]:
    library = row["distribution"]
    beside = {"torch": raw["torch"], **{name: shared[name] for name in row["shared"]}}
    return [
        Cell(f"{library}-{release}", raw["python"], {**beside, library: release}, alone=library)
        for release in releases[library]
    ]


def fits(claims: dict[str, str], pins: dict[str, str]) -> bool:
    """Whether a claim fits a release set."""
    return all(name in pins and _is_in(pins[name], spec) for name, spec in claims.items())


@functools.cache
def _is_in(version: str, specifier: str) -> bool:
    """Whether a specifier contains a version: of each pair thousands of results ask."""
    return Version(version) in SpecifierSet(specifier)


def digest(thing: object) -> str:
    """A short hash of something that JSON can say."""
    return hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).hexdigest()[:16]
