"""The command; see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.upstream.cells import Cell, digest, read
from tests.upstream.environments import cache_folder, locked, prepare

from . import pages, results
from .reasons import reason

ROOT = Path(__file__).parents[2]
SECONDS = 7200  # for one page on one side


def hub_of(cell: Cell, python: Path, folder: Path) -> Path:
    """The tiny Hub of an environment, made once for each text of `hub`."""
    text = (ROOT / "tests/documentation/hub.py").read_text(encoding="utf-8")
    home = folder / "documentation" / f"hub-{digest([cell.key, text])}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.with_suffix(".lock")):
        if not (home / "complete").exists():
            home.mkdir(exist_ok=True)
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            command = [str(python), "-m", "tests.documentation.hub", str(home)]
            with (home / "log").open("w", encoding="utf-8") as log:
                subprocess.run(command, env=environment, check=True, stdout=log, stderr=log)
            (home / "complete").touch()
    return home


def run(python: Path, home: Path, blocks: list[pages.Block], package: bool) -> list[list[str]]:
    """How each block ended, and the digest of what it made."""
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "blocks.json"
        file.write_text(json.dumps([block.text for block in blocks]))
        command = [
            str(python), "-m", "tests.documentation.child", str(file), *(["--package"] if package else [])
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [[f"the page took longer than {SECONDS} s", ""]] * len(blocks)
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    if not told:
        said = (done.stderr.strip() or "nothing").splitlines()[-1][:200]
        return [[f"the process ended with {done.returncode}: {said}", ""]] * len(blocks)
    found: list[list[str]] = json.loads(told[-1][5:])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run pages; 1 if a block ends worse with the package, or badly without a known reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.documentation", description=__doc__)
    parser.add_argument("--docs", type=Path, required=True, help="a git repository of the library")
    parser.add_argument("--library", choices=sorted(pages.PAGES), default="diffusers")
    parser.add_argument("--revision", help="of the documentation (default: the set's release)")
    parser.add_argument("--set", default="D15", help="a release set of cells.toml")
    parser.add_argument("--page", nargs="+", metavar="PAGE", help="default: all")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; list the new and the changed blocks"
    )
    parser.add_argument("--write", action="store_true", help="record the outcomes in results.json")
    asked = parser.parse_args(arguments)
    (cell,) = read().select([asked.set])
    release = cell.pins[asked.library]
    revision = asked.revision or f"v{release}"
    found = {}
    for page in asked.page or pages.PAGES[asked.library][1]:
        text = pages.read(asked.docs, revision, asked.library, page)
        if text is not None:
            found[page] = pages.blocks(text)
    if not found:
        parser.error(f"{asked.docs} has none of these pages at {revision}; --revision names another one")
    known = results.load().get(f"{asked.library} {release}", {})
    if asked.check:
        changed = [
            f"{page} {block.number}"
            for page, blocks in found.items()
            for block in blocks
            if known.get(page, {}).get(block.digest) is None
        ]
        print(*changed, f"{len(changed)} blocks are new or changed", sep="\n")
        return 1 if changed else 0
    folder = cache_folder()
    folder.joinpath("logs").mkdir(parents=True, exist_ok=True)
    environment = prepare(cell, folder, folder / "logs" / "documentation.log")
    home = hub_of(cell, environment.python, folder)
    bad = 0
    for page, blocks in found.items():
        sides = [run(environment.python, home, blocks, package) for package in (False, True)]
        rows = {}
        for block, without, ours in zip(blocks, *sides, strict=True):
            rows[block.digest] = row = results.row(block.number, without, ours)
            if said := results.fault(row):
                bad += 1
                print(
                    f"{page} {block.number}: {said}\n  without: {without[0]}\n  with:    {ours[0]}",
                    flush=True,
                )
        counts = [sum(one[0].startswith("ok") for one in side) for side in sides]
        reasons = sorted({why for one in sides[1] if (why := reason(one[0]))})
        print(f"{page}: {counts[0]} of {len(blocks)} end well without the package, {counts[1]} with it"
              f"{'; others: ' + ', '.join(reasons) if reasons else ''}", flush=True)  # fmt: skip
        if asked.write:
            results.save(f"{asked.library} {release}", page, rows)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
