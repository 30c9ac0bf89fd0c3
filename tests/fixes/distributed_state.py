"""``torch.distributed.checkpoint.state_dict``, as a fixture."""

from __future__ import annotations

import pytest


@pytest.fixture
def state_dict():
    module = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    yield module
    # Older torch keeps every model that it was asked about.
    forget = getattr(module._get_fqns, "cache_clear", None)
    if forget is not None:
        forget()
