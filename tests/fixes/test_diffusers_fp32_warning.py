"""diffusers-fp32-warning: an empty list of modules is no reason for a warning."""

from __future__ import annotations

import contextlib
import logging

import pytest

FIX_ID = "diffusers-fp32-warning"
SAYS = "should be kept in float32"


@contextlib.contextmanager
def recorded():
    """What diffusers logs about models inside the block."""
    from diffusers.models import modeling_utils

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    modeling_utils.logger.addHandler(handler)
    try:
        yield said
    finally:
        modeling_utils.logger.removeHandler(handler)


def small():
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(encoder_block_out_channels=(8,), decoder_block_out_channels=(8,),
                           num_encoder_blocks=(1,), num_decoder_blocks=(1,))  # fmt: skip


@pytest.mark.defect(FIX_ID, shows=r"should be kept in float32: \[\]")
def test_a_cast_is_silent():
    import torch

    model = small()
    with recorded() as said:
        for arguments in ((torch.bfloat16,), ("cpu", torch.float16)):
            model.to(*arguments)
            assert model.dtype == arguments[-1]
        model.to(dtype=torch.float32)
    assert not said, said


def test_a_model_with_such_modules_is_warned_about_as_upstream_does():
    import torch
    from diffusers.models import modeling_utils

    from diffusers_quantfix.engine.probe import texts_of

    upstream_warns = SAYS in texts_of(modeling_utils.ModelMixin.to)
    model = small()
    model._keep_in_fp32_modules = ["decoder"]
    filters = list(modeling_utils.logger.filters)
    with recorded() as said:
        model.to(torch.bfloat16)
    assert any(SAYS in text and "decoder" in text for text in said) == upstream_warns
    assert modeling_utils.logger.filters == filters
