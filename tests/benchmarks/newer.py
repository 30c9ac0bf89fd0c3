"""What it costs to decide by the code about releases above every claim, and that it costs nothing within the claims."""

from __future__ import annotations

import cProfile
import gc
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusers_quantfix.fixes import TESTED

from .figure import Row, figure
from .measure import ROOT, child

RUNS = 3
# Of the engine: what decides by the code.
FILES = ("proofs.py", "same_code.py", "code_marks.py", "fingerprint.py")


@figure("newer")
def newer() -> Iterator[Row]:
    """The whole stack, every target: in the releases that are claimed, and with newer numbers on the same code."""
    within = child("newer:decide", True)
    what = "decision by the code, in claimed releases"
    yield Row(f"{what}: our calls", within["calls"], "", 0, exact=True, detail=f"{within['applied']} applied")
    yield Row(f"{what}: files that are read", within["files"], "", 0, exact=True)
    said = [above() for _ in range(RUNS)]
    best = min(said, key=lambda one: one["again"])
    detail = f"best of {RUNS}; {best['by code']} of {best['applied']} by the code, {best['files']} files read"
    what = "decision by the code, every library above its claims, processor time"
    yield Row(what, best["again"], "s", 0.05, detail=detail)
    first = min(one["seconds"] for one in said)
    yield Row(
        f"{what}, with the first import of what decides", first, "s", detail="best of as many processes"
    )


def above(counted: bool = False) -> dict[str, Any]:
    """`decide` where every library has a newer number."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        for library in TESTED.keys() - {"torch"}:
            home = Path(name) / f"{library}-99.0.dist-info"
            home.mkdir()
            (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: 99.0\n")
        return child("newer:decide", counted, PYTHONPATH=f"{name}:{ROOT}")  # type: ignore[no-any-return]


def decide(counted: bool = False) -> dict[str, Any]:
    """Imports and decides about every target; what the part of it took that compares code.

    Args:
        counted: count the calls of our functions, too, which takes time.
    """
    import diffusers_quantfix as qf
    from diffusers_quantfix.engine.proofs import Proofs

    said: dict[str, Any] = {"seconds": 0.0, "calls": 0, "files": 0}
    inside = []
    plain = Proofs.changes

    def timed(self: Proofs, *arguments: Any) -> Any:
        inside.append(arguments)
        began = time.process_time()
        try:
            return plain(self, *arguments)
        finally:
            said["seconds"] += time.process_time() - began
            inside.pop()

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            said["files"] += bool(inside) or str(arguments[0]).endswith("proved_code.json")

    sys.addaudithook(opened)
    Proofs.changes = timed  # type: ignore[method-assign]
    profile = cProfile.Profile(subcalls=False, builtins=False)
    try:
        board = profile.runcall(qf.status) if counted else qf.status()
    finally:
        Proofs.changes = plain  # type: ignore[method-assign]
    for entry in profile.getstats():
        code = entry.code
        if isinstance(code, types.CodeType) and _decides(code):
            said["calls"] += entry.callcount
    applied = [answer for answer in board.targets if answer.state == "applied"]
    said["again"] = 0.0 if counted else min(_again() for _ in range(RUNS))
    return said | {"applied": len(applied), "by code": sum(answer.same_code for answer in applied)}


def _decides(code: types.CodeType) -> bool:
    """Whether this is the code of a function of ours that compares code."""
    ours = "diffusers_quantfix" in code.co_filename and code.co_filename.endswith(FILES)
    return ours and code.co_name not in ("<module>", "Proofs", "__init__")


def _again() -> float:
    """Processor seconds of all comparisons once more, with nothing known, and the files in the system's cache."""
    from diffusers_quantfix import activation
    from diffusers_quantfix.engine.proofs import Proofs
    from diffusers_quantfix.engine.versions import judge
    from diffusers_quantfix.fixes.targets import PACKAGES, PROVED_CODE, TARGETS

    outside = {name: judge(target.claims).outside for name, target in TARGETS.items()}
    proofs = Proofs(PROVED_CODE, PACKAGES, activation._runner()._ledger.below)
    gc.collect()  # none comes due in between: of this heap it takes longer than all the comparisons
    began = time.process_time()
    for name, releases in outside.items():
        if releases:
            proofs.changes(name, releases)
    return time.process_time() - began
