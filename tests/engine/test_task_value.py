"""A value of one thread or task, which cloudpickle and dill can pickle as the global that it is."""

from __future__ import annotations

import contextvars
import pickle
import re
from pathlib import Path

import pytest

import diffusers_quantfix
from diffusers_quantfix.engine.task_value import TaskValue

_asked = TaskValue(__name__, "_asked", default=3)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_is_pickled_by_its_name(protocol):
    assert pickle.loads(pickle.dumps(_asked, protocol)) is _asked


def test_each_task_has_its_own():
    def inside():
        token = _asked.set(4)
        inner = _asked.get()
        _asked.reset(token)
        return inner, _asked.get()

    assert _asked.get() == 3
    assert contextvars.copy_context().run(inside) == (4, 3)
    assert _asked.get() == 3


def test_every_one_is_named_as_its_global():
    home = Path(diffusers_quantfix.__file__).parent
    found = 0
    for file in home.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "ContextVar(" not in text or file.name == "task_value.py", file
        for variable, name in re.findall(r"^(\w+) = TaskValue\(__name__, \"(\w+)\"", text, re.MULTILINE):
            assert variable == name
            found += 1
    assert found >= 4
