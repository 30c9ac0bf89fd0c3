"""diffusers-textual-inversion-offload-flip: loading a textual inversion switches to another way of offloading."""

from __future__ import annotations

import pytest

from diffusers_quantfix.offloading.hooks import is_sequentially_offloaded
from tests.fixes import lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import without_index as without_index
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-textual-inversion-offload-flip"
FLIPPED = r"is sequentially offloaded now|requires accelerator|Torch not compiled with CUDA|same device"


@pytest.mark.defect(FIX_ID, shows=FLIPPED)
def test_hooks_that_only_align_inputs_are_no_offload(gpu):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    here = gpu.devices[0]
    pipe = pipeline().to(here)
    hook = AlignDevicesHook(execution_device=here, io_same_device=True)
    add_hook_to_module(pipe.transformer, hook)
    load(pipe)
    assert not is_sequentially_offloaded(pipe.transformer), "the transformer is sequentially offloaded now"
    assert pipe.transformer._hf_hook is hook
    assert lora_models.distance(encode(pipe, here), expected()) < 1e-5


@pytest.mark.parametrize("offload", ["enable_sequential_cpu_offload", "enable_model_cpu_offload"])
def test_offload_stays(gpu, offload):
    """The embeddings come and go under offload, with the same hooks all the time."""
    here = gpu.devices[0]
    pipe = pipeline()
    getattr(pipe, offload)(device=here)
    plain = encode(pipe, here, (2, 5, 6, 3))
    before = lora_models.hooks_of(pipe)
    load(pipe)
    assert_same_hooks(pipe, before)
    assert lora_models.distance(encode(pipe, here), expected()) < 1e-5
    if not hasattr(pipe.tokenizer, "_added_tokens_decoder") and unmet("diffusers>=0.37"):
        return  # there it takes the embeddings of slow tokenizers only out again
    pipe.unload_textual_inversion("<new>")
    assert_same_hooks(pipe, before)
    assert pipe.text_encoder.get_input_embeddings().weight.shape[0] == models.VOCABULARY
    assert lora_models.distance(encode(pipe, here, (2, 5, 6, 3)), plain) == 0


@pytest.mark.usefixtures("without_index")
@pytest.mark.parametrize("offload", ["enable_sequential_cpu_offload", "enable_model_cpu_offload"])
def test_without_an_index_interrupted_and_in_inference_mode(gpu, offload):
    here = gpu.devices[0]
    pipe = pipeline()
    getattr(pipe, offload)(device=spelled(here))
    before = lora_models.hooks_of(pipe)
    load(pipe)
    assert_same_hooks(pipe, before)

    def check(states):
        assert lora_models.distance(states, expected()) < 1e-5

    assert_goes_on(lambda: encode(pipe, here), check)


def assert_same_hooks(pipe, before):
    """All modules have the hook that they had; the embedding may be a new module, and is hooked as the old one was."""
    after = lora_models.hooks_of(pipe)
    assert before.keys() == after.keys()
    other = [
        key for key, (hook, where) in before.items() if after[key][0] is not hook or after[key][1] != where
    ]
    assert all(name.endswith("token_embedding") for _, name in other), other
    assert [after[key][1] for key in other] == [before[key][1] for key in other]


def pipeline():
    return models.flux_pipeline(text_encoder=models.clip_text(), tokenizer=models.tokenizer())


def load(pipe):
    import torch

    pipe.load_textual_inversion({"<new>": torch.linspace(-1, 1, 64)})


def expected():
    """The run of a pipeline on the CPU that was never offloaded."""
    pipe = pipeline()
    load(pipe)
    return encode(pipe, "cpu")


def encode(pipe, where, tokens=(2, 5, models.VOCABULARY, 3)):
    import torch

    with torch.no_grad():
        return pipe.text_encoder(torch.tensor([tokens], device=where)).last_hidden_state.cpu()
