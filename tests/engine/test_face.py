"""What a program calls: `apply`, `revert`, `status`."""

from __future__ import annotations

import pytest

KEYS = {"quantfix", "python", "installed", "settings", "loaded", "fixes"}
ANSWER = {
    "above", "id", "title", "state", "reason", "module", "claims", "upstream", "changes", "same_code", "targets",
}  # fmt: skip


@pytest.fixture
def three(simple):
    for name in ("second", "third"):
        (simple.site / "lib" / f"{name}.py").write_text("def f(): return 'broken'\nKEPT = [f]\n")
        simple.fix(f"fix-{name}", target=f"lib.{name}")
    return simple


def test_ids(three) -> None:
    outcome = three.run("""
        import diffusers_quantfix as qf, lib.core, lib.second, lib.third
        def values(board):
            return [answer.state for answer in board], [lib.core.f(), lib.second.f(), lib.third.f()]
        steps = [values(qf.status()), values(qf.revert("fix-second")), values(qf.revert("fix-second", "fix-f")),
                 values(qf.apply("fix-f")), values(qf.revert()), values(qf.revert()), values(qf.apply("fix-third")),
                 values(qf.apply()), values(qf.apply())]
        tell(steps=steps)
    """)

    def row(*on):
        return [
            ["applied" if one in on else "disabled" for one in range(3)],
            ["patched" if one in on else "broken" for one in range(3)],
        ]

    assert outcome["steps"] == [
        row(0, 1, 2),
        row(0, 2),
        row(2),
        row(0, 2),
        row(),
        row(),
        row(2),
        row(0, 1, 2),
        row(0, 1, 2),
    ]


def test_revert_before_the_target_comes(three) -> None:
    outcome = three.run("""
        import diffusers_quantfix as qf
        qf.status(load=False)
        board = qf.revert("fix-f")
        import lib.core, lib.second
        first = board["fix-f"].state, board.ok, lib.core.f(), lib.second.f()
        qf.revert()
        import lib.third
        last = lib.third.f(), states("fix-third"), qf.status()["fix-third"].state, reason("fix-third")
        import lib.third
        tell(first=first, last=last, back=[qf.apply()["fix-third"].state, lib.third.f(), lib.core.f()])
    """)
    # The board says "disabled" for what was taken back, whether its target has come or not.
    assert outcome["first"] == ["disabled", False, "broken", "patched"]
    assert outcome["last"] == [
        "broken",
        "disabled",
        "disabled",
        "removed by revert(); apply() installs it again",
    ]
    assert outcome["back"] == ["applied", "patched", "patched"]


@pytest.mark.parametrize("call", ["apply", "revert"])
def test_an_unknown_id(three, call) -> None:
    outcome = three.run(f"""
        import diffusers_quantfix as qf, lib.core
        said = []
        for name in ("fix-secnod", "zzz", ""):
            try:
                qf.{call}("fix-f", name)
            except ValueError as error:
                said.append(str(error))
        try:
            qf.status()["fix-thrid"]
        except KeyError as error:
            said.append(error.args[0])
        tell(said=said, f=lib.core.f())
    """)
    assert [sentence.partition(" or ")[0].rstrip("?") for sentence in outcome["said"]] == [
        "no fix is called 'fix-secnod'; did you mean fix-second",
        "no fix is called 'zzz'; see `python -m diffusers_quantfix status`",
        "no fix is called ''; see `python -m diffusers_quantfix status`",
        "no fix is called 'fix-thrid'; did you mean fix-third",
    ]
    assert outcome["f"] == "patched", "a wrong call changes nothing"


def test_the_board(three) -> None:
    outcome = three.run("""
        import json, diffusers_quantfix as qf
        board = qf.status()
        text = str(board)
        tell(machine=json.loads(json.dumps(board.to_dict())), text=text, same=repr(board) == text, length=len(board),
             ids=[answer.id for answer in board])
    """)
    machine = outcome["machine"]
    assert set(machine) == KEYS
    assert all(set(answer) == ANSWER for answer in machine["fixes"])
    assert machine["installed"] == {"lib": "1.0"}
    assert machine["loaded"] == ["lib.core", "lib.second", "lib.third"]
    assert machine["fixes"][0] == {
        "id": "fix-f",
        "title": "title of fix-f",
        "state": "applied",
        "reason": "patched here (lib 1.0)",
        "module": "lib.core",
        "claims": {"lib": "<2"},
        "upstream": ["https://example.org/1"],
        "changes": ["lib.core.f"],
        "above": False,
        "same_code": False,
        "targets": [
            {
                "id": "fix-f",
                "state": "applied",
                "reason": "patched here (lib 1.0)",
                "module": "lib.core",
                "claims": {"lib": "<2"},
                "changes": ["lib.core.f"],
                "above": False,
                "same_code": False,
            }
        ],
    }
    assert outcome["ids"] == sorted(outcome["ids"])
    assert (outcome["same"], outcome["length"]) == (True, 3)
    text = outcome["text"]
    assert max(map(len, text.splitlines())) <= 80
    assert "installed: lib 1.0" in text
    assert "imported to answer: lib.core, lib.second, lib.third" in text
    assert "applied      fix-f" in text
    assert "\n\n3 applied\n\n" in text, "the summary comes first"


def test_the_board_is_a_snapshot(three) -> None:
    outcome = three.run("""
        import diffusers_quantfix as qf
        board = qf.status()
        qf.revert()
        tell(old=[answer.state for answer in board], new=[answer.state for answer in qf.status()])
    """)
    assert outcome.told == {"old": ["applied"] * 3, "new": ["disabled"] * 3}


def test_a_board_can_be_pickled_and_copied(three) -> None:
    outcome = three.run("""
        import copy, pickle, diffusers_quantfix as qf
        board = qf.status()
        kept = [pickle.loads(pickle.dumps(board, number)) for number in range(pickle.HIGHEST_PROTOCOL + 1)]
        tell(same=[one.to_dict() == board.to_dict() for one in [*kept, copy.deepcopy(board), copy.copy(board)]])
    """)
    assert set(outcome["same"]) == {True}


def test_status_does_not_watch_after_revert_or_off(three) -> None:
    outcome = three.run("""
        import sys, diffusers_quantfix as qf
        qf.revert()
        board = qf.status()
        tell(states=[answer.state for answer in board], loaded="lib" in sys.modules, ok=board.ok)
    """)
    assert outcome.told == {"states": ["disabled"] * 3, "loaded": False, "ok": True}


def test_a_typo_in_a_release_is_not_our_traceback(three) -> None:
    """A library that breaks on a second target leaves the first one patched."""
    (three.site / "lib" / "second.py").write_text("import torch_that_is_not_there")
    outcome = three.run("""
        import diffusers_quantfix as qf
        board = qf.status()
        tell(states=[answer.state for answer in board], reason=board["fix-second"].reason, loaded=board.loaded)
    """)
    assert outcome["states"] == ["applied", "waiting", "applied"]
    assert outcome["reason"] == (
        "lib is installed but cannot be imported: ModuleNotFoundError: No module named 'torch_that_is_not_there'"
    )
    assert outcome["loaded"] == ["lib.core", "lib.third"]


@pytest.mark.parametrize("call", ["revert(None)", "apply(3)", "revert(['fix-f'])", "apply(b'fix-f')"])
def test_an_id_that_is_no_string_is_a_type_error(three, call) -> None:
    """`revert(None)` said that no fix is called None, `revert([...])` that a list cannot be hashed."""
    outcome = three.run(f"""
        import diffusers_quantfix as qf, lib.core
        try:
            qf.{call}
        except TypeError as error:
            tell(said=str(error), f=lib.core.f(), state=states("fix-f"))
    """)
    assert outcome["said"].startswith(
        "ids of fixes are strings, one argument each, as in revert('fix-f'); got "
    )
    assert (outcome["f"], outcome["state"]) == ("patched", "applied")
