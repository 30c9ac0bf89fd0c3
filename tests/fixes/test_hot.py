"""What a forward pass or a tensor method reaches is declared hot, and holds nothing but plain functions."""

from __future__ import annotations

import importlib
import sys

import pytest

import diffusers_quantfix
from diffusers_quantfix.engine.probe import resolve, slot
from diffusers_quantfix.fixes.targets import TARGETS, declaration

# Names that every forward pass calls, whoever has them; and every method of a tensor is called by every move.
HOT = {"forward", "__torch_function__", "__torch_dispatch__", "onload_", "offload_", "matmul_4bit", "pre_forward",
       "post_forward"}  # fmt: skip


@pytest.fixture(scope="module")
def board():
    pytest.importorskip("diffusers", reason="the stack is not installed")
    return diffusers_quantfix.status()


@pytest.mark.parametrize("fix_id", TARGETS)
def test_hot_code(board, fix_id, side):
    assert board[fix_id].state != "failed", board[fix_id].reason
    if side == "bare" or board[fix_id].state != "applied":
        pytest.skip(f"not applied here: {board[fix_id].state}")
    hot = declaration(fix_id).hot
    module = importlib.import_module(TARGETS[fix_id].module)
    for where in board[fix_id].changes:
        owner_name, _, name = where.rpartition(".")
        within = owner_name.removeprefix(module.__name__).lstrip(".")
        try:
            owner = resolve(module, within) if within else module
            value = slot(owner, name)[1]
        except LookupError:  # in another module of the library
            owner, value = None, None
        if name in HOT or (isinstance(owner, type) and issubclass(owner, sys.modules["torch"].Tensor)):
            assert hot, f"{where} is reached by a forward pass or by a move of a tensor: declare hot=True"
        if hot:
            assert not hasattr(value, "_self_wrapper"), f"{where} holds a wrapt object"
