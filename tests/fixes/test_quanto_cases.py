"""The cases of verify for the patches of quanto say that all is right."""

from __future__ import annotations

import importlib

import pytest

from diffusers_quantfix.fixes import INDEX
from diffusers_quantfix.verify.case import CannotReproduce
from tests.fixes import quanto_models as q

IDS = [
    fix_id
    for fix_id in INDEX
    if fix_id.startswith("quanto-") or fix_id.split("-", 1)[1].startswith("quanto-")
]
IDS.remove("diffusers-quanto-lora")


@pytest.mark.parametrize("fix_id", IDS)
def test_a_case(tmp_path, fix_id):
    q.quanto()
    case = importlib.import_module(f"diffusers_quantfix.verify.cases.{fix_id.replace('-', '_')}").case
    try:
        assert case(str(tmp_path))
    except CannotReproduce as reason:
        assert "needs an NVIDIA GPU" in str(reason) or "optimum-quanto>=0.2.6" in str(reason)
        pytest.skip(str(reason))
