"""transformers-save-offloaded-tied: an offloaded model with tied weights cannot be saved."""

from __future__ import annotations

import functools

import pytest

from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

FIX_ID = "transformers-save-offloaded-tied"
STATE = "accelerate-offloaded-state-dict"  # without it there is nothing to save
SHOWS = "Some tensors share memory"
EMPTY = (
    "Cannot copy out of meta tensor|contained shared tensors|share memory|is not an nn.Module|"
    "_is_hf_initialized|HalfTensor"
)


def _language_model(**config):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=1, **sizes, **config)).eval()


def _offloaded(model, device):
    """As diffusers does it: without the hooks of the loading."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    return cpu_offload(model, device)


def _run(model, device):
    import torch

    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]], device=device)).logits.cpu()


def _saved_again(model, folder):
    return type(model).from_pretrained(models.saved(model, folder))


@pytest.mark.defect(STATE, shows=EMPTY)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_saved_as_it_is(tmp_path):
    """Nothing quantized, no GPU; a second group of tied weights is made by the program, and declared by its class."""
    import torch

    plain = _language_model()
    kind = type("Own", (type(plain),), {})
    keys = kind._tied_weights_keys
    second = "transformer.h.0.ln_2.bias"
    kind._tied_weights_keys = (
        {**keys, second: "transformer.h.0.ln_1.bias"} if isinstance(keys, dict) else [*keys, second]
    )
    for loaded_as, tie in ((type(plain), False), (kind, True)):
        model = loaded_as.from_pretrained(models.saved(plain, tmp_path / "first"), device_map={"": "cpu"})
        if tie:
            model.transformer.h[0].ln_2.bias = model.transformer.h[0].ln_1.bias
        again = _saved_again(_offloaded(model, torch.device("cpu")), tmp_path / f"second-{tie}")
        if not tie:
            assert four_bit.differences(four_bit.state_of(again), four_bit.state_of(plain)) == []
        assert again.lm_head.weight is again.transformer.wte.weight
        assert torch.equal(_run(again, "cpu"), _run(plain, "cpu"))
        assert torch.equal(_run(model, "cpu"), _run(plain, "cpu")), "the saved model still works"


@pytest.mark.defect(STATE, shows=EMPTY)
def test_what_is_declared_and_not_tied_is_saved(tmp_path):
    import torch

    plain = _language_model(tie_word_embeddings=False)
    assert not torch.equal(plain.lm_head.weight, plain.transformer.wte.weight)
    model = type(plain).from_pretrained(models.saved(plain, tmp_path / "first"), device_map={"": "cpu"})
    again = _saved_again(_offloaded(model, torch.device("cpu")), tmp_path / "second")
    assert four_bit.differences(four_bit.state_of(again), four_bit.state_of(plain)) == []


@pytest.mark.skipif(
    bool(unmet("transformers>=4.45")), reason="before, transformers refuses to move a 4-bit model"
)
@pytest.mark.defect(STATE, shows=EMPTY)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_quantized_one(gpu, tmp_path):
    import torch

    device = gpu.devices[0]
    load = functools.partial(four_bit.load, type(plain := _language_model()), device_map={"": 0})
    model = load(models.saved(plain, tmp_path / "first"))
    reference = _run(model, device)
    model.to("cpu")
    _offloaded(model, device)
    again = type(plain).from_pretrained(models.saved(model, tmp_path / "second"), device_map={"": 0})
    assert torch.equal(_run(again, device), reference)
    assert torch.equal(_run(model, device), reference), "the saved model still works"


def test_a_spread_model_is_saved_as_before(gpu, tmp_path):
    """Upstream reads what is offloaded of it shard by shard."""
    plain = _language_model(tie_word_embeddings=False)
    spread = {"transformer": 0, "lm_head": "cpu"}
    model = type(plain).from_pretrained(models.saved(plain, tmp_path / "first"), device_map=spread)
    assert model.lm_head.weight.is_meta
    again = _saved_again(model, tmp_path / "second")
    assert four_bit.differences(four_bit.state_of(again), four_bit.state_of(plain)) == []
