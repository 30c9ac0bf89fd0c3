"""What `explain` learned from texts that people wrote: `diffusers_quantfix/advisories/asked.json`.

python -m tests.asked             # how well each text is answered by what the other threads teach (two minutes)
python -m tests.asked --write     # the texts' terms and the weights that answer them best (half a minute)

The texts are those of `tests/tools/reports*.txt`, and what is said about each bug in `tests/tools/errors.txt`, which
counts little: we wrote it.  The weights are those of a multinomial logistic regression over all bugs and "none".
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diffusers_quantfix.advisories import catalogue, evidence, symptoms
from diffusers_quantfix.fixes.targets import declaration, declarations

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

TOOLS = Path(__file__).parent / "tools"
FILE = Path(evidence.__file__).with_name("asked.json")
REPORTS = tuple(sorted(path.name for path in TOOLS.glob("reports*.txt")))
OURS = 0.1  # the weight of a text that we wrote about a bug
_SMOOTH = 6.0  # of the regression
_FOLDS = 10


class Row(NamedTuple):
    """A labelled text.

    Attributes:
        file: where it is.
        kind: see the head of `reports.txt`.
        bugs: the ids of the fixes that are a right first answer; none for a foreign text.
        source: where it stands.
        text: what it says.
    """

    file: str
    kind: str
    bugs: tuple[str, ...]
    source: str
    text: str

    @property
    def thread(self) -> str:
        """Texts of one thread teach nothing about each other."""
        return self.source.partition(",")[0] if not self.source.startswith("written") else self.text

    @property
    def is_ours(self) -> bool:
        return self.file == "errors.txt"


def rows(files: Iterable[str] = REPORTS) -> list[Row]:
    """The texts of people in these files of `tests/tools`."""
    return [
        Row(
            file,
            kind,
            tuple(declaration(name).id for name in names.split(", ") if name != "none"),
            source,
            text,
        )
        for file in files
        for kind, names, source, text in re.findall(
            r"(?ms)^=== (\w+) \| (.*?) \| (.*?)\n(.*?)(?=\n===|\Z)",
            (TOOLS / file).read_text(encoding="utf-8"),
        )
    ]


def ours() -> list[Row]:
    """What upstream raised in our tests, the last line of it alone, and what declarations say."""
    from tests.tools.test_explain import ERRORS, NOT_ALONE

    found = []
    for name, (kind, text) in ERRORS.items():
        bugs, source = (declaration(name).id,), f"ours {declaration(name).id}"
        found.append(Row("errors.txt", kind, bugs, source, text))
        if kind == "recorded" and name not in NOT_ALONE:
            last = [line for line in text.splitlines() if not line.startswith((" ", "Traceback"))][-1]
            found.append(Row("errors.txt", "last line", bugs, source, last))
    for fix in declarations():
        symptom = catalogue.first_sentence(fix.symptom)
        found.append(Row("errors.txt", "symptom", (fix.id,), f"ours {fix.id}", symptom))
    return found


def asked(texts: Iterable[Row]) -> list[tuple[tuple[str, ...], frozenset[str]]]:
    """What `catalogue.Asked` is made of."""
    return [
        (row.bugs, frozenset(evidence.Text(row.text).terms))
        for row in texts
        if row.kind not in ("last line", "symptom")
    ]


class Numbers(NamedTuple):
    """The evidence of all texts: of each bug, for none, and which answers are right (the last one is none)."""

    bugs: np.ndarray
    none: np.ndarray
    right: np.ndarray
    weight: np.ndarray


def numbers(texts: Sequence[Row]) -> Numbers:
    """The evidence of each text, from what the texts of other threads teach."""
    import numpy as np

    fixes = declarations()
    known, place = catalogue.catalogue(tuple(fixes)), {fix.id: number for number, fix in enumerate(fixes)}
    said, bugs, none = [evidence.Text(row.text) for row in texts], [], []
    teaching = [(row, one) for row in texts for one in asked([row])]
    right = np.zeros((len(texts), len(fixes) + 1))
    for number, row in enumerate(texts):
        others = catalogue.Asked([one for other, one in teaching if other.thread != row.thread])
        alike = others.alike((*said[number].readings, said[number].terms))
        found = evidence.findings(said[number], known, alike)
        bugs.append([one.numbers for one in found])
        none.append(evidence.against(said[number], alike, any(one.message for one in found)))
        right[number, [place[bug] for bug in row.bugs] or -1] = 1
    weight = np.array([OURS if row.is_ours else 1.0 for row in texts])
    return Numbers(np.array(bugs), np.array(none), right, weight)


def fit(data: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """The weights of `evidence.EVIDENCE` and `evidence.NONE`."""
    import numpy as np

    scale = data.bugs.reshape(-1, data.bugs.shape[2]).std(0) + 1e-6
    scale_none = np.where(data.none.std(0) > 0, data.none.std(0), 1.0)
    middle = np.where(data.none.std(0) > 0, data.none.mean(0), 0.0)
    bugs, none, half = data.bugs / scale, (data.none - middle) / scale_none, data.bugs.shape[2]

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores = np.concatenate([bugs @ weights[:half], (none @ weights[half:])[:, None]], 1)
        scores = np.exp(scores - scores.max(1, keepdims=True))
        right = scores * data.right
        slope = (scores / scores.sum(1, keepdims=True) - right / right.sum(1, keepdims=True)) * data.weight[
            :, None
        ]
        smooth = np.full(len(weights), _SMOOTH)
        smooth[-1] = 0  # "always"
        value = (data.weight * np.log(scores.sum(1) / right.sum(1))).sum() + (smooth * weights**2).sum() / 2
        return value, smooth * weights + np.concatenate(
            [np.einsum("nf,nfk->k", slope[:, :-1], bugs), slope[:, -1] @ none]
        )

    weights = _minimum(loss, np.zeros(half + none.shape[1]))
    of_none = weights[half:] / scale_none
    of_none[-1] -= of_none @ middle
    return weights[:half] / scale, of_none


def _minimum(function, start: np.ndarray) -> np.ndarray:
    """Where a smooth convex function is least: L-BFGS with ten pairs."""
    import numpy as np

    place, (value, slope), pairs = start, function(start), []
    for _ in range(300):
        step, used = slope.copy(), []
        for moved, turned in reversed(pairs):
            used.append((moved @ step) / (moved @ turned))
            step -= used[-1] * turned
        step *= (
            (pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1])
            if pairs
            else 1 / np.linalg.norm(slope)
        )
        for (moved, turned), share in zip(pairs, reversed(used), strict=True):
            step += moved * (share - (turned @ step) / (moved @ turned))
        length = 1.0
        while True:
            new = place - length * step
            new_value, new_slope = function(new)
            if new_value <= value - 1e-4 * length * (slope @ step) or length < 1e-9:
                break
            length /= 2
        if (new - place) @ (new_slope - slope) > 1e-10:
            pairs = [*pairs, (new - place, new_slope - slope)][-10:]
        done = value - new_value < 1e-7 * abs(value)
        place, value, slope = new, new_value, new_slope
        if done:
            break
    return place


def answered(texts: Sequence[Row], data: Numbers) -> list[tuple[Row, list[str]]]:
    """Each text of people with the bugs that are named for it: first by what the other threads teach."""
    import numpy as np

    ids = [fix.id for fix in declarations()]
    fold = np.array([int(hashlib.md5(row.thread.encode()).hexdigest(), 16) % _FOLDS for row in texts])
    found: dict[int, list[str]] = {}
    for number in range(_FOLDS):
        bugs, none = fit(Numbers(*(part[fold != number] for part in data)))
        for one in np.where(fold == number)[0]:
            scores = data.bugs[one] @ bugs
            share = 1 / (1 + np.exp(scores - data.none[one] @ none).sum())
            found[one] = (
                [] if share >= symptoms.NONE_OF_THEM else [ids[place] for place in np.argsort(-scores)[:3]]
            )
    return [(row, found[number]) for number, row in enumerate(texts) if not row.is_ours]


def rates(answers: Iterable[tuple[Row, list[str]]]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(file, kind) -> how many are answered right first, and among three; how many there are.  Right for a foreign
    text is no answer."""
    found: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for row, bugs in answers:
        first = bugs[:1] == [] if not row.bugs else bool({*bugs[:1]} & {*row.bugs})
        three = first if not row.bugs else bool({*bugs[:3]} & {*row.bugs})
        for key in ((row.file, row.kind), ("all", row.kind), ("all", "covered" if row.bugs else "not ours")):
            found[key] = [had + new for had, new in zip(found[key], (first, three, 1), strict=True)]
    return {key: (first, three, count) for key, (first, three, count) in sorted(found.items())}


def content(data: Numbers, texts: Sequence[Row]) -> str:
    """`asked.json` as it should be now, one line for each text."""
    bugs, none = fit(data)
    weights = {
        "evidence": dict(zip(evidence.EVIDENCE, (round(float(one), 2) for one in bugs), strict=True)),
        "none": dict(zip(evidence.NONE, (round(float(one), 2) for one in none), strict=True)),
    }
    lines = ",\n".join(
        json.dumps([" ".join(names), " ".join(sorted(found))]) for names, found in asked(texts)
    )
    head = json.dumps(weights, indent=1)[:-2]
    return f'{head},\n "texts": [\n{lines}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.asked", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--misses", action="store_true", help="print what is not answered right")
    options = parser.parse_args()
    texts = [*rows(), *ours()]
    data = numbers(texts)
    if options.write:
        FILE.write_text(content(data, texts), encoding="utf-8")
        return 0
    answers = answered(texts, data)
    for (file, kind), (first, three, count) in rates(answers).items():
        print(f"{file:<20}{kind:<10} first {first:>3}, among three {three:>3} of {count}")
    for row, bugs in answers if options.misses else ():
        if not (bugs == [] if not row.bugs else {*bugs[:1]} & {*row.bugs}):
            print(f"{row.file} {row.kind} {row.source}: {bugs} instead of {row.bugs}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
