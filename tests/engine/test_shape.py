"""The shape of the package: which way imports go, what the light path may load, what a fix must declare."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from diffusers_quantfix.advisories.harm import MEANING
from diffusers_quantfix.engine.fix import Fix, Target
from diffusers_quantfix.fixes import DISTRIBUTIONS, OPTIONS
from diffusers_quantfix.fixes import FIXES as IDS
from diffusers_quantfix.fixes.targets import TARGETS, declarations, fix_module
from tests import index
from tests.trees import Tree

from .harness import ROOT

PACKAGE = ROOT / "diffusers_quantfix"
ENGINE = sorted((PACKAGE / "engine").glob("*.py"))
LIGHT = [
    PACKAGE / name for name in ("__init__.py", "activation.py", "fixes/__init__.py", "fixes/index.py")
] + [PACKAGE / "engine" / name for name in ("__init__.py", "settings.py", "watcher.py", "fix.py")]
FIXES = sorted(
    path
    for path in (PACKAGE / "fixes").rglob("*.py")
    if path.name != "__init__.py" and path.parent != PACKAGE / "fixes"
)
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "optimum",
    "quanto",
    "gguf",
    "torchao",
    "peft",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", ".").removesuffix(".__init__")


@functools.cache
def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Full names of the modules that a file imports; not those for type checkers only."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not inside_functions and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            base = ".".join(part for part in (base, node.module) if part)
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("path", ENGINE, ids=name_of)
def test_the_engine_knows_no_library_by_name(path) -> None:
    """Examples in docstrings and comments may name one; what runs may not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    code = ast.unparse(tree).replace("diffusers_quantfix", "").replace("DIFFUSERS_QUANTFIX", "")
    assert not re.findall("|".join(LIBRARIES), code)


@pytest.mark.parametrize("path", ENGINE, ids=name_of)
def test_the_engine_imports_the_engine_only(path) -> None:
    ours = {name for name in imports(path) if name.partition(".")[0] == "diffusers_quantfix"}
    # Beside itself the engine has only the ground to stand on: how a paragraph is wrapped.
    assert {name for name in ours if not name.startswith("diffusers_quantfix.engine")} <= {
        "diffusers_quantfix.text",
        "diffusers_quantfix.text.wrapped",
    }


@pytest.mark.parametrize("path", LIGHT, ids=name_of)
def test_the_light_path_loads_the_builtins_only(path) -> None:
    outside = {name.partition(".")[0] for name in imports(path, inside_functions=False)} - {
        "diffusers_quantfix"
    }
    assert outside <= {"__future__", "os", "sys", "_thread"}


@pytest.mark.parametrize("path", FIXES, ids=name_of)
def test_a_fix_imports_the_engine_and_shared_homes_only(path) -> None:
    for name in imports(path):
        assert not name.startswith("diffusers_quantfix.fixes."), "no fix imports another"
    top = {name.partition(".")[0] for name in imports(path, inside_functions=False)}
    assert not top & {*LIBRARIES, "wrapt", "packaging", "re", "dataclasses", "logging"}


@pytest.mark.parametrize("path", FIXES, ids=name_of)
def test_every_helper_of_a_fix_says_its_types(path) -> None:
    """strict mypy exempts the fixes for what is inside `patch`; what stands beside it is annotated all the same."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [one for one in (node.args.vararg, node.args.kwarg) if one]
            bare = [one.arg for one in arguments if one.annotation is None]
            assert not bare and node.returns, f"{node.name}: {', '.join(bare) or 'what it returns'}"


def test_every_fix_file_is_listed_and_every_listed_file_is_there() -> None:
    files = {name_of(path).removeprefix("diffusers_quantfix.fixes.") for path in FIXES}
    listed = {target.file: target.fix for target in TARGETS.values()}
    assert set(listed) == files
    assert len(listed) == len(set(listed.values())) == len(IDS)


def test_the_index_says_what_the_declarations_say() -> None:
    assert index.INDEX.read_text(encoding="utf-8") == index.text(), f"run {index.WRITE}"
    assert index.main(["--check"]) == 0


def test_the_index_is_made_where_it_cannot_be_read(tmp_path) -> None:
    tree = Tree(tmp_path / "tree")
    before = tree.read("diffusers_quantfix/fixes/index.py")
    (tree.folder / "diffusers_quantfix/fixes/index.py").write_text("<<<<<<< ours\n")
    done = tree.run("-m", "tests.index", "--check")
    assert done.returncode == 1 and f"is stale; run {index.WRITE}" in done.stderr
    assert tree.run("-m", "tests.index", "--write").returncode == 0
    assert tree.read("diffusers_quantfix/fixes/index.py") == before


def test_no_name_stands_twice() -> None:
    one = Fix("", id="lib-one", module="lib", claims={})
    many = (Target("lib-a", "lib.a", {}), Target("lib-b", "lib.b", {}))
    for other in (
        Fix("", id="lib-other", targets=(*many, Target("lib-one", "lib.c", {}))),
        Fix("", id="lib-b", targets=(Target("lib-b", "a", {}), Target("lib-c", "b", {}))),
    ):
        with pytest.raises(ValueError, match="stands twice: lib-"):
            index.text({"a": one, "b": other})


def test_every_option_is_declared_by_a_fix_and_every_declared_option_is_listed() -> None:
    declared = {option: what for fix in declarations() for option, what in fix.options.items()}
    assert sorted(OPTIONS) == sorted(declared)
    assert all(re.fullmatch(r"[a-z]+:[a-z-]+", option) and what for option, what in declared.items())


@pytest.mark.parametrize("fix_id", IDS)
def test_a_fix_declares_itself(fix_id) -> None:
    before = set(sys.modules)
    module = fix_module(fix_id)
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & set(LIBRARIES)
    fix = module.FIX
    assert isinstance(fix, Fix)
    assert (fix.id, tuple(sorted(target.name for target in fix.targets))) == (
        fix_id,
        tuple(sorted(IDS[fix_id])),
    )
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", fix.id)
    assert 0 < len(fix.title) <= 100 and fix.text.split("\n")[1] == "", "the first line is the title"
    for word in ("Symptom", "Cause", "Upstream", "Patch"):
        assert len(fix.section(word)) > 4, f"the docstring has no entry {word}"
    assert fix.harm in MEANING
    assert fix.patterns or fix.harm != "error", "the text of the error, or the harm that shows without one"
    tried_everywhere = [pattern for pattern in fix.patterns if re.match(r"\(\?=|\.\*", pattern)]
    assert not tried_everywhere, r"begin it with \A: on a long text it takes minutes"
    # Empty where nobody has reported the defect.
    assert all(re.match(r"https://github\.com/[^/]+/[^/]+/", link) for link in fix.upstream)
    for target in fix.targets:
        assert target.claims and set(target.claims) <= set(DISTRIBUTIONS), "status lists what decides"
        for specifier in target.claims.values():
            SpecifierSet(specifier)
        if target.fixed_in:
            distribution, _, version = target.fixed_in.partition(" ")
            assert distribution in target.claims and re.match(r"\d+\.\d+", version), (
                "as in 'bitsandbytes 0.45.3'"
            )
    assert callable(module.broken) and callable(module.patch)


@pytest.mark.parametrize("fix_id", TARGETS)
def test_a_fix_is_proved_on_two_sides(fix_id) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "fixes").glob("test_*.py"))
    assert fix_id in re.findall(r'"([a-z0-9-]+)"', tests), (
        "no test in tests/fixes has the mark defect(...) of this fix"
    )


@pytest.mark.parametrize("path", FIXES, ids=lambda path: path.stem)
def test_a_probe_that_compiles_the_source_is_asked_once(path) -> None:
    """The patched function's code is not that of its file, and `recompiled` refuses it: the fix took itself out."""
    functions = {
        node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    reached, pending = set(), ["broken"]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += (
                [node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)]
                if name in functions
                else []
            )
    if reached & {"exchanged", "recompiled"}:
        module = importlib.import_module(name_of(path))
        assert module.FIX.asked_once


# The floors of the house, from the ground up: a room imports from its own floor and those below, never from above.
FLOORS = [
    {"text", "first_library", "forked", "uncaught", "finishing"},
    {"engine"},
    {"surroundings", "torch_modes"},
    {"weights", "loading"},
    {"offloading"},
    {"models", "adapters"},
    {"fixes"},
    {"user_settings", "process_runner", "activation"},
    {"placement"},
    {"memory", "dequantizing"},
    {"__init__", "verify"},
    {"advisories"},
    {"commands"},
    {"__main__", "startup"},  # the start-up files are a package of their own in the wheel
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
EVERY = sorted(PACKAGE.rglob("*.py"))
FILES = {name_of(path): path for path in EVERY}


def module_graph() -> dict[str, set[str]]:
    """Every module of the package and those that it imports, lazy imports within functions included."""
    modules = {name_of(path) for path in EVERY}
    return {
        name_of(path): {
            name
            for name in imports(path) & modules
            # ``from .room import module`` names the room as well; that is no import of what its __init__ holds.
            if not any(other.startswith(f"{name}.") for other in imports(path) & modules)
            or name == "diffusers_quantfix"
        }
        - {name_of(path)}
        for path in EVERY
    }


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def test_every_room_has_its_floor() -> None:
    assert {room_of(name_of(path)) for path in EVERY} == set(FLOOR_OF)


def test_imports_go_down_only() -> None:
    up = [
        f"{module} -> {imported}"
        for module, found in module_graph().items()
        for imported in found
        if room_of(imported) != room_of(module)
        # What is asked of the package itself is its version.
        and not (
            imported == "diffusers_quantfix" and "diffusers_quantfix.__version__" in imports(FILES[module])
        )
        and FLOOR_OF[room_of(imported)] > FLOOR_OF[room_of(module)]
    ]
    assert not up


def test_no_import_runs_in_a_circle() -> None:
    graph = module_graph()

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        pending = list(graph[start])
        while pending:
            module = pending.pop()
            if module not in seen:
                seen.add(module)
                pending += graph[module]
        return seen

    assert not sorted(module for module in graph if module in reachable(module))


def test_nothing_hot_is_wrapped_by_wrapt() -> None:
    """torch.compile skips a wrapt object or fails on it: hot code gets plain functions."""
    wrapping = {name_of(path) for path in EVERY if ".wrap_wrapt(" in path.read_text(encoding="utf-8")}
    assert wrapping, "the loading path is wrapped by wrapt"
    assert wrapping <= {name_of(path) for path in FIXES}, "a fix says itself how it wraps"
    assert not [name for name in wrapping if importlib.import_module(name).FIX.hot]


# What changes the state of the whole process, for its other threads too; "and restored" is a change.
PROCESS_WIDE = {
    "addFilter", "addHandler", "basicConfig", "captureWarnings", "catch_warnings", "chdir", "filterwarnings",
    "fork_rng", "gc.disable", "gc.enable", "gc.freeze", "gc.unfreeze", "logging.disable", "removeFilter",
    "removeHandler", "seed", "setLevel", "setcheckinterval", "set_default_device", "set_default_dtype",
    "set_num_threads", "set_rng_state", "setlocale", "setprofile", "setrecursionlimit", "random.setstate",
    "setswitchinterval", "settrace", "simplefilter", "umask", "use_deterministic_algorithms",
}  # fmt: skip
OWN_PROCESS = ("commands/", "verify/")  # tools that a person starts, and the processes that they start


def process_wide_calls(text: str) -> list[str]:
    """Calls that change process-wide state, as written."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and PROCESS_WIDE & {ast.unparse(node.func), getattr(node.func, "attr", "")}
    ]


def test_nothing_changes_the_state_of_the_process() -> None:
    found = {}
    for path in EVERY:
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(OWN_PROCESS):
            found[name] = process_wide_calls(path.read_text(encoding="utf-8"))
    # The default dtype that upstream has changed for a load is restored; the option "debug", on our own logger.
    assert {name: calls for name, calls in found.items() if calls} == {
        "loading/turns.py": ["torch.set_default_dtype"],
        "process_runner.py": ["logger.addHandler", "logger.setLevel"],
    }
    assert process_wide_calls("import gc\nwith warnings.catch_warnings():\n    gc.disable()") == [
        "warnings.catch_warnings", "gc.disable"
    ]  # fmt: skip
