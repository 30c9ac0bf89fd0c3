"""transformers-4bit-cuda: ``cuda()`` of a 4-bit transformers model does nothing and returns None."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

FIX_ID = "transformers-4bit-cuda"
SHOWS = "returned None|is on cpu|NoneType"
movable = pytest.mark.skipif(
    bool(unmet("transformers>=4.45")), reason="before, transformers refuses to move a 4-bit model"
)


def _text_encoder(folder):
    plain = models.clip_text()
    return four_bit.load(type(plain), models.saved(plain, folder), device_map={"": 0})


def _encode(model, device):
    import torch

    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]], device=device)).last_hidden_state.cpu()


@pytest.mark.defect("bnb-quant-state-code", shows="quant_state.code is on", needs="accelerate>=1.2")
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="accelerate>=1.2")
def test_it_moves_and_returns_the_model(gpu, tmp_path):
    """To the current device, and to the device that is named."""
    import torch

    here, there = gpu.devices[0], gpu.devices[-1]
    model = _text_encoder(tmp_path)
    reference = _encode(model, here)
    for arguments, device in (((), here), ((there.index,), there), ((there,), there)):
        model.to("cpu")
        assert model.cuda(*arguments) is model, "cuda() returned None"
        four_bit.assert_whole(model, device)
        assert torch.equal(_encode(model, device), reference)
    model.to("cpu")
    four_bit.assert_whole(model.cuda(device=there), there)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.defect("accelerate-4bit-hooks-follow", shows=SHOWS + "|same device", needs="transformers>=4.45")
def test_a_model_with_hooks_on_one_device(gpu, tmp_path):
    """Those that accelerate before 1.2 puts on it."""
    import torch

    device = gpu.devices[0]
    model = _text_encoder(tmp_path)
    reference = _encode(model, device)
    model.to("cpu")
    model.cuda()
    four_bit.assert_whole(model, device)
    assert torch.equal(_encode(model, device), reference)


@movable
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_subclass_that_calls_it(gpu, tmp_path):
    """A program's own class may have a ``cuda`` above it."""
    model = _text_encoder(tmp_path)
    model.to("cpu")
    own = type("Own", (type(model),), {"cuda": lambda self, *args: super(own, self).cuda(*args)})
    model.__class__ = own
    assert model.cuda() is model, "cuda() returned None"
    four_bit.assert_whole(model, gpu.devices[0])


@movable
def test_a_spread_model_stays_where_it_is(gpu, tmp_path):
    """As without the package: a program that calls ``cuda()`` of one goes on."""
    if len(gpu.devices) < 2 or unmet("transformers<4.53"):
        pytest.skip("needs two CUDA devices, and a transformers whose cuda() moves no 4-bit model")
    plain = models.t5_encoder()
    spread = {"shared": 0, "encoder.embed_tokens": 0, "encoder.block": 1, "encoder.final_layer_norm": 1}
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), device_map=spread)
    before = {name: one.device for name, one in model.named_parameters()}
    assert len(set(before.values())) == 2
    assert model.cuda() is None
    assert {name: one.device for name, one in model.named_parameters()} == before


def test_a_model_that_is_not_quantized(gpu):
    model = models.clip_text()
    assert model.cuda() is model
    assert {parameter.device for parameter in model.parameters()} == {gpu.devices[0]}
