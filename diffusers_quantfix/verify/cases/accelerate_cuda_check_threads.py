"""Two threads check for a GPU at once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


def case(work: str) -> str | None:
    import os
    from unittest import mock

    import torch
    from accelerate.utils import imports

    from ..models.threads import overlapping_calls

    found = torch.cuda.is_available()

    def check(middle: Callable[[], object]) -> None:
        with mock.patch.object(torch.cuda, "is_available", lambda: (middle(), found)[1]):
            imports.is_cuda_available()

    with mock.patch.dict(os.environ):
        os.environ.pop(_VARIABLE, None)
        overlapping_calls(check)
        assert _VARIABLE not in os.environ, f"{_VARIABLE} stays in the environment"
    return "the environment is as before"
