"""The module has its own loader; what looks at it meets nothing of ours."""

from __future__ import annotations


def test_the_module_has_its_own_loader_before_it_is_executed(world) -> None:
    world.library(
        core="""
        seen = type(__loader__).__name__, type(__spec__.loader).__name__
        import inspect, sys
        source = inspect.getsource(sys.modules[__name__])
        def f(): return "broken"
    """
    )
    world.fix()
    outcome = world.run("""
        import diffusers_quantfix, importlib, importlib.resources, importlib.util, inspect, pickle, pkgutil
        import lib.core, sys
        core = lib.core
        loaders = [type(core.__loader__), type(core.__spec__.loader), type(importlib.util.find_spec("lib.core").loader)]
        importlib.reload(core)
        loaders += [type(core.__loader__), type(core.__spec__.loader)]
        tell(f=core.f(), seen=core.seen, loaders=[kind.__name__ for kind in loaders],
             source="def f" in core.source, inner=inspect.getsource(core.f),
             same=core.__spec__.loader is core.__loader__,
             resource=importlib.resources.files("lib").joinpath("core.py").is_file(),
             data=len(pkgutil.get_data("lib", "core.py")) > 0,
             pickled=type(pickle.loads(pickle.dumps(core.__spec__)).loader).__name__,
             cached=core.__spec__.cached.endswith(".pyc"), file=core.__file__.endswith("core.py"))
    """)
    assert outcome["f"] == "patched"
    assert outcome["seen"] == ["SourceFileLoader"] * 2
    assert outcome["loaders"] == ["SourceFileLoader"] * 5
    assert outcome["pickled"] == "SourceFileLoader"
    # inspect follows __wrapped__: a reader of f is shown the library's own source.
    assert outcome["inner"].startswith("def f()")
    assert all(outcome[fact] for fact in ("source", "same", "resource", "data", "cached", "file"))


def test_the_spec_that_someone_asks_for(simple) -> None:
    """A spec before the import holds our stand-in: it answers like the loader, and can be copied and pickled."""
    outcome = simple.run("""
        import copy, importlib.util, pickle, sys
        import diffusers_quantfix, lib
        spec = importlib.util.find_spec("lib.core")
        loader = spec.loader
        twins = [copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))]
        answers = [loader.get_filename("lib.core").endswith("core.py"), "def f" in loader.get_source("lib.core"),
                   loader.get_code("lib.core").co_name, loader.is_package("lib.core"), spec.has_location,
                   loader.path == spec.origin, hasattr(loader, "no_such_thing"), "lib.core" in sys.modules]
        modules = []
        for each in [spec, *twins]:  # how tools import a second copy, which is theirs alone
            module = importlib.util.module_from_spec(each)
            each.loader.exec_module(module)
            modules.append(module.f())
        tell(answers=answers, modules=modules, loaders=[type(each.loader).__name__ for each in [spec, *twins]])
    """)
    assert outcome["answers"] == [True, True, "<module>", False, True, True, False, False]
    assert outcome["modules"] == ["broken"] * 4
    assert outcome["loaders"] == ["SourceFileLoader"] * 4


def test_runpy_and_main(simple) -> None:
    outcome = simple.run("""
        import runpy, diffusers_quantfix
        tell(main=runpy.run_module("lib.core")["f"]())
        import lib.core
        tell(f=lib.core.f())
    """)
    assert outcome.told == {"main": "broken", "f": "patched"}
