"""The hint after a crash: by the state of the fix that the error belongs to."""

from __future__ import annotations

import pytest

from diffusers_quantfix import activation
from diffusers_quantfix.advisories import crash
from diffusers_quantfix.engine.board import STATES, Answer, Board

FIX = "diffusers-gguf-sequential"


def error() -> KeyError:
    """As it is raised: the frames tell it from any other ``KeyError: None``."""
    scope: dict[str, object] = {}
    text = "\n" * 30 + "def __new__():\n    raise KeyError(None)\n"
    exec(compile(text, "/venv/site-packages/diffusers/quantizers/gguf/utils.py", "exec"), scope)
    try:
        scope["__new__"]()  # type: ignore[operator]
    except KeyError as raised:
        return raised
    raise AssertionError


@pytest.fixture
def board(monkeypatch):
    def make(state: str, above: bool = False) -> None:
        from diffusers_quantfix.fixes import FIXES

        answers = [
            Answer(
                fix_id, fix_id, "m", {}, (), state if fix_id == FIX else "waiting", "the reason", (), above
            )
            for fix_id in FIXES
        ]
        monkeypatch.setattr(activation, "status", lambda load: Board("1", answers, {}, {}))

    return make


@pytest.mark.parametrize("state", STATES)
def test_a_hint_for_what_is_not_patched_alone(board, state):
    board(state)
    said = crash.hint(error())
    if state in ("disabled", "candidate", "out-of-range", "failed", "overwritten"):
        assert said.startswith(f"this looks like {FIX}, which is not patched here: the reason; ")
        assert "\n" not in said
        assert f"explain {FIX}" in said or "status" in said
    else:
        assert not said


def test_a_candidate_above_its_range_can_be_chosen(board):
    board("candidate", above=True)
    assert f"DIFFUSERS_QUANTFIX=newer:{FIX}" in crash.hint(error())


def test_other_errors_and_our_own_faults_are_silent(board, monkeypatch):
    board("disabled")
    assert crash.hint(ValueError("too many values to unpack")) == ""
    monkeypatch.setattr(activation, "status", lambda load: 1 / 0)
    assert crash.hint(error()) == ""
