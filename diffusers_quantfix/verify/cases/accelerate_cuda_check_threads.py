"""Two threads check for a GPU at once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


def case(work: str) -> str | None:
    import os
    import threading
    from unittest import mock

    import torch
    from accelerate.utils import imports

    from ..models.threads import overlapping_calls

    found, middles = bool(torch.cuda.is_available()), threading.local()

    def is_available() -> bool:
        middles.own()
        return found

    def check(middle: Callable[[], object]) -> None:
        middles.own = middle
        imports.is_cuda_available()

    with mock.patch.dict(os.environ), mock.patch.object(torch.cuda, "is_available", is_available):
        os.environ.pop(_VARIABLE, None)
        overlapping_calls(check)
        assert _VARIABLE not in os.environ, f"{_VARIABLE} stays in the environment"
    return "the environment is as before"
