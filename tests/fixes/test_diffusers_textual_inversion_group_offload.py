"""diffusers-textual-inversion-group-offload: a textual inversion of a group-offloaded text encoder."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import each_spelling as each_spelling
from tests.fixes.group_offloaded import LEAF, MODES, assert_left, modes, offload
from tests.fixes.test_diffusers_textual_inversion_offload_flip import encode, load, pipeline
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-textual-inversion-group-offload"
SHOWS = "index out of range|same device|device-side assert"
KNOWN = (2, 5, 6, 3)

pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.35")), reason="before diffusers 0.35 groups cannot be set up once more"
)


def unloads(pipe) -> bool:
    """Whether this diffusers takes the embeddings of such a tokenizer out again."""
    return hasattr(pipe.tokenizer, "_added_tokens_decoder") or not unmet("diffusers>=0.37")


def outputs(device):
    """Without and with the new token, of a text encoder that was never offloaded."""
    pipe = pipeline().to(device)
    plain = encode(pipe, device, KNOWN)
    load(pipe)
    return plain, encode(pipe, device)


def assert_comes_and_goes(gpu, device, mode, first=True):
    plain, expected = outputs(device)
    pipe = pipeline()
    before = gpu.allocated(device)
    offload(pipe.text_encoder, device, mode)
    if first:
        assert torch.equal(encode(pipe, device, KNOWN), plain)
    load(pipe)

    def check(output):
        assert torch.equal(output, expected)
        assert_left(gpu, device, before)

    for _ in range(2):
        check(encode(pipe, device))
    assert_goes_on(lambda: encode(pipe, device), check)
    if unloads(pipe):
        pipe.unload_textual_inversion("<new>")
        for _ in range(2):
            assert torch.equal(encode(pipe, device, KNOWN), plain)
            assert_left(gpu, device, before)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.usefixtures("each_spelling")
@modes("leaf-stream", long=("leaf-record", "leaf-low"))
def test_with_a_stream(gpu, mode):
    assert_comes_and_goes(gpu, gpu.devices[0], mode)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_embedding_that_is_replaced(gpu):
    """Without a stream the group moves what its modules have; another module is in no group."""
    if not unloads(pipeline()):
        pytest.skip("this diffusers does not take the embeddings of such a tokenizer out again")
    assert_comes_and_goes(gpu, gpu.devices[0], LEAF)


@modes("block", "block-stream", "leaf-stream", long=("block-low", "leaf"))
def test_before_the_first_run(gpu, mode):
    assert_comes_and_goes(gpu, gpu.devices[0], mode, first=False)


def test_a_load_that_fails_leaves_a_text_encoder_that_runs(gpu, monkeypatch):
    """After the embedding has got its new size."""
    device = gpu.devices[0]
    plain, _ = outputs(device)
    pipe = pipeline()
    offload(pipe.text_encoder, device, MODES["leaf-stream"])
    assert torch.equal(encode(pipe, device, KNOWN), plain)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipe.tokenizer, "convert_tokens_to_ids", stop)
    with pytest.raises(KeyboardInterrupt):
        load(pipe)
    for _ in range(2):
        assert torch.equal(encode(pipe, device, KNOWN), plain)
        assert torch.isfinite(encode(pipe, device)).all()  # with the place of the new token


def test_an_encoder_that_is_passed(gpu):
    """As for the second text encoder of Stable Diffusion XL; the first one keeps its groups."""
    device = gpu.devices[0]
    _, expected = outputs(device)
    pipe, other = pipeline(), models.clip_text()
    for one in (pipe.text_encoder, other):
        offload(one, device, MODES["leaf-stream"])
    encode(pipe, device, KNOWN)
    hooks = [
        module._diffusers_hook for module in pipe.text_encoder.modules() if hasattr(module, "_diffusers_hook")
    ]
    pipe.load_textual_inversion(
        {"<new>": torch.linspace(-1, 1, 64)}, text_encoder=other, tokenizer=pipe.tokenizer
    )
    kept = [
        module._diffusers_hook for module in pipe.text_encoder.modules() if hasattr(module, "_diffusers_hook")
    ]
    assert all(one is two for one, two in zip(hooks, kept, strict=True))
    with torch.no_grad():
        found = other(torch.tensor([[2, 5, models.VOCABULARY, 3]], device=device)).last_hidden_state.cpu()
    assert torch.equal(found, expected)
