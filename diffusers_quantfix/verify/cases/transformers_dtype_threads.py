"""Two threads make transformers models in float16 at once."""

from __future__ import annotations

import functools


def case(work: str) -> str | None:
    import torch
    from transformers.modeling_utils import local_torch_dtype

    from ..models.threads import kept, overlapping

    with kept():
        before = torch.get_default_dtype()
        overlapping(functools.partial(local_torch_dtype, torch.float16))
        after = torch.get_default_dtype()
    assert after == before, f"the default dtype is {after}"
    return f"the default dtype is {after} again"
