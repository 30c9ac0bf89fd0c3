"""Fake libraries, fake fixes, and scripts that run on them in a process of their own.

The real package runs on fake fixes: a stand-in for ``diffusers_quantfix.fixes``, whose folder is another one with its
own ``index.py``, stands in ``sys.modules`` before the package is imported.  Neither torch nor any library that is
patched is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from diffusers_quantfix.engine.fix import Target
from tests import index

ROOT = Path(__file__).resolve().parents[2]

CORE = """
def f(x=0):
    "What f does."
    return "broken"

KEPT = [f]  # the original; in a list, where no repair of aliases looks
"""

PROBE = """
def broken(module):
    return module.f() == "broken"
"""

PATCH = """
def patch(module, ledger):
    def make(original):
        def f(*args, **kwargs):
            assert original(*args, **kwargs) == "broken"
            return "patched"
        return f
    ledger.wrap_plain(module, "f", make)
"""

PREAMBLE = """
import sys
fixes = type(sys)("diffusers_quantfix.fixes")
fixes.__package__ = fixes.__name__
fixes.__path__ = [{fixes!r}]
def read_the_index(name):
    # at its first use: the package must not be imported before the script does it
    if name.startswith("__"):
        raise AttributeError(name)
    del fixes.__getattr__
    with open({package!r}) as file:
        exec(compile(file.read(), {package!r}, "exec"), vars(fixes))
    fixes.DISTRIBUTIONS = {distributions!r}
    return getattr(fixes, name)
fixes.__getattr__ = read_the_index
sys.modules[fixes.__name__] = fixes
def wait_for_the_fakes():
    # The package's own file has the names, as a constant.
    libraries = frozenset({libraries!r})
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader
    get_code = loader.get_code
    def faked(constant):
        if hasattr(constant, "co_consts"):
            return constant.replace(co_consts=tuple(map(faked, constant.co_consts)))
        return libraries if isinstance(constant, frozenset) and "diffusers" in constant else constant
    loader.get_code = lambda self, name: (
        faked(get_code(self, name)) if name.endswith("diffusers_quantfix") else get_code(self, name)
    )
wait_for_the_fakes()
TOLD = {{}}
def tell(**facts):
    import json
    TOLD.update(facts)
    with open({told!r}, "w") as file:
        json.dump(TOLD, file, default=str)
def states(*ids, load=False):
    import diffusers_quantfix
    board = diffusers_quantfix.status(load=load)
    return [board[fix_id].state for fix_id in ids] if len(ids) != 1 else board[ids[0]].state
def reason(fix_id):
    import diffusers_quantfix
    return diffusers_quantfix.status(load=False)[fix_id].reason
"""

# A finder that came before ours and one that comes after it; ``asked`` lists who was asked for what.
FINDERS = """
import sys
asked = []
class Finder:
    def __init__(self, name): self.name = name
    def find_spec(self, name, path=None, target=None): asked.append((self.name, name))
sys.meta_path.insert(0, Finder("before"))
sys.meta_path.insert(2, Finder("after"))
"""

COMMAND_LINE = """
import runpy
runpy.run_module("diffusers_quantfix", run_name="__main__", alter_sys=True)
"""


class Outcome:
    """What a script left behind: exit code, output, and the facts that it told."""

    def __init__(self, code: int, out: str, err: str, told: dict[str, object]) -> None:
        self.code = code
        self.out = out
        self.err = err
        self.told = told

    def __getitem__(self, fact: str):
        assert fact in self.told, f"never told {fact}: {self.err}"
        return self.told[fact]


class World:
    """A folder with libraries, their metadata, and fixes for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.fixes = folder / "fixes"
        self.targets: dict[str, Target] = {}
        self.distributions: list[str] = []
        self.tested: dict[str, str] = {}
        self.site.mkdir()
        self.fixes.mkdir()

    def library(self, name: str = "lib", version: str | None = "1.0", site: Path | None = None, **files: str):
        """A package ``name`` with a module per keyword (``core`` by default), and metadata unless version is None."""
        site = site or self.site
        package = site / name
        package.mkdir(parents=True)
        for module, text in {"__init__": "", **(files or {"core": CORE})}.items():
            (package / f"{module}.py").write_text(textwrap.dedent(text))
        if version is not None:
            self.distribution(name, version, site=site)
        return package

    def distribution(self, name: str, version: str, site: Path | None = None) -> Path:
        folder = (site or self.site) / f"{name.replace('-', '_')}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.distributions.append(name)
        return folder

    def fix(
        self,
        fix_id: str = "fix-f",
        target: str = "lib.core",
        claims: dict[str, str] | None = None,
        fixed_in: str = "",
        text: str | None = None,
        body: str = PROBE + PATCH,
        title: str = "",
        targets: tuple[Target, ...] = (),
        asked_once: bool = False,
    ) -> str:
        """A fix; ``body`` holds its probe and patch, or ``text`` its whole file; ``targets`` where it has several."""
        file = fix_id.replace("-", "_")
        targets = targets or (Target(fix_id, target, claims or {"lib": "<2"}, fixed_in),)
        written = ", ".join(
            f"Target({t.name!r}, {t.module!r}, {t.claims!r}, {t.fixed_in!r})" for t in targets
        )
        declaration = f"""
            '''{title or f"title of {fix_id}"}.

            Symptom: it breaks.
            Upstream: https://example.org/1.
            '''
            from diffusers_quantfix.engine.fix import Fix, Target
            FIX = Fix(__doc__, id={fix_id!r}, targets=({written},), asked_once={asked_once})
        """
        if text is None:
            text = textwrap.dedent(declaration) + textwrap.dedent(body)
        (self.fixes / f"{file}.py").write_text(text)
        for one in targets:
            self.targets[one.name] = Target(one.name, one.module, one.claims, one.fixed_in, fix_id, file)
        return fix_id

    def run(
        self,
        script: str,
        settings: str = "",
        arguments: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        timeout: float = 120,
    ) -> Outcome:
        """Run a script after the preamble; a traceback of the script fails the test."""
        outcome = self.attempt(script, settings, arguments, options, timeout)
        assert outcome.code == 0, outcome.err
        return outcome

    def attempt(
        self,
        script: str,
        settings: str = "",
        arguments: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        timeout: float = 120,
    ) -> Outcome:
        """Run a script after the preamble, whatever becomes of it."""
        told = self.folder / "told.json"
        told.unlink(missing_ok=True)
        preamble = PREAMBLE.format(
            fixes=str(self.fixes),
            package=str(ROOT / "diffusers_quantfix" / "fixes" / "__init__.py"),
            libraries=sorted({target.module.partition(".")[0] for target in self.targets.values()}),
            distributions=tuple(self.distributions),
            told=str(told),
        )
        (self.fixes / "index.py").write_text(index.rendered(self.targets.values(), (), self.tested))
        shutil.copy(ROOT / "diffusers_quantfix" / "fixes" / "targets.py", self.fixes)
        main = self.folder / "main.py"
        main.write_text(preamble + textwrap.dedent(script))
        done = subprocess.run(
            [sys.executable, *options, str(main), *arguments],
            env=self.environment(settings),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        facts = json.loads(told.read_text()) if told.exists() else {}
        return Outcome(done.returncode, done.stdout, done.stderr, facts)

    def command(self, *arguments: str, settings: str = "", before: str = "") -> Outcome:
        """``python -m diffusers_quantfix <arguments>`` on the fake fixes."""
        return self.attempt(textwrap.dedent(before) + COMMAND_LINE, settings, arguments)

    def environment(self, settings: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DIFFUSERS_"))
        }
        path = os.pathsep.join([str(self.site), str(ROOT)])
        # Tests rewrite modules within a second, which cached bytecode would not notice.
        kept |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        return kept | ({"DIFFUSERS_QUANTFIX": settings} if settings else {})
