"""``torch.distributed.checkpoint.state_dict`` as a fixture, and what is asked of every quantized model."""

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


def assert_what_is_trained_only(model, state_dict) -> None:
    """The second layer and its optimizer alone, as one saves a LoRA."""
    import torch

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("1."))
    optimizer = torch.optim.AdamW(model[1].parameters())
    options = state_dict.StateDictOptions(ignore_frozen_params=True)
    of_model, _ = state_dict.get_state_dict(model, optimizer, options=options)
    assert {"1.weight", "1.bias"} <= set(of_model) and "0.weight" not in of_model
