"""accelerate-cuda-check-threads: threads that check for a GPU at once."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diffusers_quantfix.verify.models.threads import overlapping_calls
from tests.gate import unmet

FIX_ID = "accelerate-cuda-check-threads"
VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
imports = pytest.importorskip("accelerate.utils.imports")
pytestmark = pytest.mark.skipif(
    bool(unmet("accelerate>=1.1.0")), reason="before 1.1.0 the check is another function"
)


@pytest.mark.defect(FIX_ID, shows="is left in the environment")
def test_the_environment_is_as_before(monkeypatch):
    import torch

    monkeypatch.delenv(VARIABLE, raising=False)
    middles, seen = {}, []

    def is_available() -> bool:
        seen.append(os.environ.get(VARIABLE))
        middles[threading.get_ident()]()
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)

    def check(middle) -> None:
        middles[threading.get_ident()] = middle
        assert imports.is_cuda_available() is False

    overlapping_calls(check)
    assert seen == ["1", "1"]
    assert VARIABLE not in os.environ, f"{VARIABLE} is left in the environment"


def test_what_the_program_has_set_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [imports.is_cuda_available() for _ in range(50)], range(4)))
    assert len({value for values in found for value in values}) == 1
    assert os.environ[VARIABLE] == "0"


def test_it_can_be_nested(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with imports.patch_environment(one="1"):
        assert os.environ["ONE"] == "1"
        with imports.patch_environment(one=2):
            assert os.environ["ONE"] == "2"
        assert os.environ["ONE"] == "1"
    assert "ONE" not in os.environ


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_meanwhile(monkeypatch):
    """The thread that checks does not exist in it."""
    entered, left = threading.Event(), threading.Event()

    def hold() -> None:
        with imports.patch_environment(one="1"):
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    child = os.fork()
    if not child:
        code = 1
        try:
            imports.is_cuda_available()
            code = 0
        finally:
            os._exit(code)
    left.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
