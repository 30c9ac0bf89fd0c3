"""A fix with several targets: each is decided by itself, named by itself, and shown with the others."""

from __future__ import annotations

import pytest

from diffusers_quantfix.engine.fix import Fix, Target

SECOND = "def f(): return 'broken'\nKEPT = [f]\n"


@pytest.fixture
def two(world):
    """A fix for ``lib.core`` and ``lib.second``, one for ``lib.third`` alone."""
    world.library()
    for name in ("second", "third"):
        (world.site / "lib" / f"{name}.py").write_text(SECOND)
    world.fix(
        "fix-both",
        targets=(
            Target("fix-core", "lib.core", {"lib": "<2"}),
            Target("fix-second", "lib.second", {"lib": "<2"}),
        ),
    )
    world.fix("fix-third", target="lib.third")
    return world


VALUES = """
        def values():
            import lib.core, lib.second, lib.third
            return [lib.core.f(), lib.second.f(), lib.third.f()]
"""
ALL = ["patched", "patched", "patched"]


def test_each_target_is_patched_when_it_is_imported(two) -> None:
    outcome = two.run("""
        import diffusers_quantfix as qf, lib.core
        def told():
            board = qf.status(load=False)
            return [board[name].state for name in ("fix-both", "fix-core", "fix-second")], str(board)
        before, text = told()
        import lib.second
        after, later = told()
        tell(before=before, after=after, text=text, later=later, values=[lib.core.f(), lib.second.f()],
             ids=[answer.id for answer in qf.status(load=False)])
    """)
    assert outcome["before"] == ["applied", "applied", "waiting"]
    assert outcome["after"] == ["applied"] * 3
    assert outcome["values"] == ["patched", "patched"]
    assert outcome["ids"] == ["fix-both", "fix-third"], "one answer for each fix"
    assert "fix-second: waiting: lib.second has not been imported yet" in outcome["text"]
    assert "fix-core: " not in outcome["text"], "it has the same answer as the fix"
    assert "fix-second" not in outcome["later"]


def test_a_fix_or_one_of_its_targets_is_reverted_and_applied(two) -> None:
    outcome = two.run(f"""{VALUES}
        import diffusers_quantfix as qf
        steps = [values()]
        for step in (lambda: qf.revert("fix-second"), lambda: qf.revert("fix-both"), lambda: qf.apply("fix-core"),
                     lambda: qf.apply("fix-both"), qf.revert, qf.apply):
            step()
            steps.append(values())
        board = qf.status()
        tell(steps=steps, machine=board.to_dict()["fixes"][0], changes=board["fix-second"].changes)
    """)
    off = "broken"
    assert outcome["steps"] == [
        ALL,
        ["patched", off, "patched"],
        [off, off, "patched"],
        ["patched", off, "patched"],
        ALL,
        [off, off, off],
        ALL,
    ]
    machine = outcome["machine"]
    assert (machine["id"], machine["title"], machine["state"]) == ("fix-both", "title of fix-both", "applied")
    assert machine["changes"] == ["lib.core.f", "lib.second.f"]
    assert [target["id"] for target in machine["targets"]] == ["fix-core", "fix-second"]
    assert outcome["changes"] == ["lib.second.f"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ("skip:fix-both", ["broken", "broken", "patched"]),
        ("skip:fix-second", ["patched", "broken", "patched"]),
        ("only:fix-core,only:fix-third", ["patched", "broken", "patched"]),
        ("only:fix-both", ["patched", "patched", "broken"]),
    ],
)
def test_settings_name_a_fix_or_a_target(two, settings, wanted) -> None:
    outcome = two.run(f"{VALUES}\n        import diffusers_quantfix\n        tell(values=values())", settings)
    assert outcome["values"] == wanted
    assert not outcome.err


def test_a_fault_of_one_target_is_shown_and_leaves_the_other(world) -> None:
    world.library(core="def f(): return 'broken'\n", second="def g(): return 1\n")
    world.fix(
        "fix-both",
        targets=(
            Target("fix-core", "lib.core", {"lib": "<2"}),
            Target("fix-second", "lib.second", {"lib": "<2"}),
        ),
    )
    outcome = world.run("""
        import diffusers_quantfix as qf, lib.core, lib.second
        board = qf.status()
        tell(states=[board[name].state for name in ("fix-both", "fix-core", "fix-second")], ok=board.ok,
             text=str(board), f=lib.core.f())
    """)
    assert outcome["states"] == ["failed", "applied", "failed"]
    assert (outcome["ok"], outcome["f"]) == (False, "patched")
    assert "fix-core: applied: patched here (lib 1.0)" in outcome["text"]


READ = "[name for name in sys.modules if name.startswith('diffusers_quantfix.fixes.fix_')]"


@pytest.mark.parametrize(
    ("claims", "tested", "settings", "files"),
    [
        ({"lib": "<2"}, "2.0", "", ["diffusers_quantfix.fixes.fix_f"]),
        ({"lib": "<1"}, "2.0", "", []),  # fixed in a release that was tested
        ({"lib": ">=2"}, "2.0", "", []),
        (
            {"lib": "<1"},
            "0.9",
            "",
            ["diffusers_quantfix.fixes.fix_f"],
        ),  # the bug may be in a release unknown to us
        ({"lib": "<1"}, "2.0", "newer", ["diffusers_quantfix.fixes.fix_f"]),
        ({"lib": "<1"}, "2.0", "newer:fix-f", ["diffusers_quantfix.fixes.fix_f"]),
    ],
)
def test_an_import_reads_the_file_of_a_fix_only_where_it_may_patch_or_warn(
    world, claims, tested, settings, files
) -> None:
    world.library()
    world.fix(claims=claims)
    world.tested = {"lib": tested}
    outcome = world.run(
        f"import sys, diffusers_quantfix, lib.core\ntell(files={READ}, f=lib.core.f())", settings
    )
    assert outcome["files"] == files


def test_a_report_asks_the_probe_that_no_import_needed(world) -> None:
    world.library()
    world.fix(claims={"lib": "<1"}, fixed_in="lib 1")
    world.fix("fix-old", claims={"lib": ">=2"})
    world.fix(
        "fix-gone", claims={"lib": "<1"}, fixed_in="lib 1", body="def broken(m): return False\npatch = None\n"
    )
    world.tested = {"lib": "2.0"}
    outcome = world.run(f"""
        import sys, diffusers_quantfix as qf, lib.core
        before = {READ}
        board = qf.status(load=False)
        tell(before=before, after={READ}, above=board["fix-f"].above,
             states=[board[name].state for name in ("fix-f", "fix-old", "fix-gone")], reason=board["fix-gone"].reason)
    """)
    assert outcome["before"] == []
    assert outcome["states"] == ["candidate", "candidate", "out-of-range"]
    assert outcome["above"] is True
    assert outcome["reason"] == "lib 1.0 is outside <1; fixed upstream in lib 1"
    assert not outcome.err, "nothing was warned of: a report says it"


@pytest.mark.parametrize("besides", [{"module": "lib"}, {"claims": {"lib": ""}}, {"fixed_in": "lib 2"}])
def test_what_a_target_says_is_not_said_of_the_fix(besides):
    target = Target("a-fix-part", "lib", {"lib": ""})
    with pytest.raises(TypeError, match="a-fix: module, claims and fixed_in stand in each of the targets"):
        Fix("A fix.", id="a-fix", targets=(target,), **besides)
