"""transformers-meta-component-device: a sequentially offloaded transformers model says that it is on meta."""

from __future__ import annotations

import logging
import warnings

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import without_index as without_index
from tests.fixes.offloaded import (
    SHOWS,
    assert_plain_property,
    bert,
    easy_animate,
    llama,
    longcat_image,
    offload,
    offload_sequentially,
    pix2pix_zero,
    tokenizer,
)
from tests.gate import unmet
from tests.rig import models

FIX_ID = "transformers-meta-component-device"
ENCODERS = {"bert": bert, "clip": models.clip_text, "t5": models.t5_encoder}
CPU = "cpu"


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
@pytest.mark.parametrize(
    "name", ["EasyAnimatePipeline", "EasyAnimateControlPipeline", "EasyAnimateInpaintPipeline"]
)
def test_easy_animate_encodes_a_prompt(name):
    reference, pipe = encoded(easy_animate(name)), easy_animate(name)
    offload_sequentially(pipe, CPU)
    assert_equal(encoded(pipe), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
def test_easy_animate_encodes_a_prompt_on_a_gpu(gpu):
    pipe = easy_animate()
    for device in (gpu.devices[0], gpu.devices[-1]):
        offload_sequentially(pipe, device)
        embeddings = encoded(pipe)
        assert {tensor.device for tensor in embeddings} == {device}
        assert_equal(embeddings, encoded(easy_animate().to(device)))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_pix2pix_zero_embeds_captions():
    import torch

    reference, pipe = pix2pix_zero().get_embeds(["w1 w2", "w3"]), pix2pix_zero()
    offload(pipe.text_encoder)
    assert torch.equal(pipe.get_embeds(["w1 w2", "w3"]), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.37")
def test_longcat_image_rewrites_a_prompt():
    """Its text encoder writes a better prompt with ``generate``."""
    reference, pipe = longcat_image().rewire_prompt("w1 w2 w3", device=CPU), longcat_image()
    offload(pipe.text_encoder)
    assert pipe.rewire_prompt("w1 w2 w3", device=CPU) == reference


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_cogview4_of_the_git_builds_before_its_release(gpu):
    """diffusers issue 10958: the ids are padded to a multiple of 16 and go to the device of the text encoder."""
    import torch

    pipe = cogview4()
    for device in (torch.device(CPU), gpu.devices[0]):
        pipe.remove_all_hooks()
        offload_sequentially(pipe, device)
        assert_equal([pipe._get_glm_embeds("w1 w2")], [cogview4().to(device)._get_glm_embeds("w1 w2")])


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("name", ENCODERS)
def test_token_ids_can_be_sent_to_the_device_of_a_text_encoder(name):
    """What prompt weighting libraries do."""
    reference, encoder = hidden(ENCODERS[name]()), ENCODERS[name]()
    offload(encoder)
    assert_equal([hidden(encoder)], [reference])


# ---------------------------------------------------------------------- what must stay as it was


def test_a_model_that_nothing_holds_keeps_its_answer():
    import torch
    from accelerate import init_empty_weights
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_execution_device_hook

    with torch.device("meta"):
        unloaded = bert()
    assert unloaded.device.type == "meta"
    add_hook_to_module(unloaded, AlignDevicesHook(io_same_device=True))
    assert unloaded.device.type == "meta"
    with init_empty_weights():
        empty = bert()
    assert empty.device.type == "meta"
    attach_execution_device_hook(empty, "meta")
    assert empty.device.type == "meta"
    assert bert().device.type == CPU


def test_models_that_are_spread_or_offloaded_in_part(gpu, tmp_path):
    from accelerate import dispatch_model

    first, second = gpu.pair
    spread = dispatch_model(
        bert(), {"embeddings": first, "encoder": second, "pooler": second}, force_hooks=True
    )
    assert spread.device == first
    device = gpu.devices[-1].index
    for places in (
        {"embeddings": device, "encoder": CPU, "pooler": CPU},
        {"embeddings": CPU, "encoder": device, "pooler": device},
        {"embeddings": "disk", "encoder": device, "pooler": device},
    ):
        model = dispatch_model(bert(), places, main_device=device, offload_dir=str(tmp_path))
        assert model.device == gpu.devices[-1]


def test_parts_of_an_offloaded_model_answer_for_themselves(gpu):
    """The encoder of T5 is a model of its own; its embedding is tied to that of the root."""
    model = models.t5_encoder()
    offload(model, device=gpu.devices[-1])
    assert model.device == model.encoder.device == gpu.devices[-1]
    assert hidden(model).device == gpu.devices[-1]
    assert model.encoder.device == gpu.devices[-1]


@pytest.mark.usefixtures("without_index")
@pytest.mark.parametrize("name", ENCODERS)
def test_without_an_index_interrupted_and_in_inference_mode(gpu, name):
    device = gpu.devices[0]
    reference, encoder = hidden(ENCODERS[name]().to(device)), ENCODERS[name]()
    offload(encoder, device=device)

    def check(states):
        assert states.device == device
        assert_equal([states], [reference])

    assert_goes_on(lambda: hidden(encoder), check)


def test_a_hook_that_fetches_all_submodules():
    from accelerate import cpu_offload

    reference, model = hidden(bert()), bert()
    cpu_offload(model, execution_device=CPU, preload_module_classes=["BertModel"])
    assert model.device.type == CPU
    assert_equal([hidden(model)], [reference])


def test_removed_hooks(gpu):
    from accelerate.hooks import remove_hook_from_module

    model = bert()
    offload(model, device=gpu.devices[0])
    remove_hook_from_module(model, recurse=True)
    assert model.device.type == CPU


@pytest.mark.skipif(bool(unmet("transformers>=4.47")), reason="generate did not compile by itself before")
def test_generate_does_not_compile_an_offloaded_model(gpu):
    """Upstream decides by the device, and kept away from offloaded models only because it was meta."""
    from transformers import GenerationConfig

    config = GenerationConfig().compile_config or compile_config()
    resident = llama().to(gpu.devices[0])
    assert resident.get_compiled_call(config) is not resident.__call__
    assert hasattr(resident, "_compiled_call")
    model = llama()
    offload(model, device=gpu.devices[0])
    assert model.get_compiled_call(config) == model.__call__
    assert not hasattr(model, "_compiled_call")
    if hasattr(config, "_compile_all_devices"):  # upstream's own tests insist, since 4.49
        config._compile_all_devices = True
        model.get_compiled_call(config)
        assert hasattr(model, "_compiled_call")


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_from_an_offloaded_model(gpu, cache):
    """The same tokens, and no false word about ids on another device ("the model is on meta")."""
    import torch

    if cache and not unmet("transformers>=4.49,<4.50"):
        pytest.skip("transformers 4.49 starts a static cache on meta, and accelerate cannot send it anywhere")
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    reference = llama().generate(ids, **options)
    model = llama()
    offload(model, device=gpu.devices[0])
    heard = Heard()
    with heard.listening("transformers.generation.utils"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tokens = model.generate(ids.to(model.device), **options)
    assert tokens.tolist() == reference.tolist()
    assert not hasattr(model, "_compiled_call")
    said = heard.lines + [str(warning.message) for warning in warned]
    assert not [line for line in said if "being on a device type different" in line]


def test_the_property_is_a_plain_one():
    assert_plain_property(bert(), FIX_ID)


# ---------------------------------------------------------------------- helpers


class Heard(logging.Handler):
    """The lines that a logger of transformers says; it does not propagate, so caplog hears none."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def listening(self, name):
        import contextlib

        @contextlib.contextmanager
        def block():
            logger = logging.getLogger(name)
            logger.addHandler(self)
            try:
                yield
            finally:
                logger.removeHandler(self)

        return block()


def cogview4():
    """A pipeline with the line of CogView4Pipeline in the git builds of diffusers 0.33.0.dev0."""
    import torch
    from diffusers import DiffusionPipeline

    class CogView4(DiffusionPipeline):
        model_cpu_offload_seq = "text_encoder"

        def __init__(self, tokenizer, text_encoder):
            super().__init__()
            self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder)

        @torch.no_grad()
        def _get_glm_embeds(self, prompt):
            ids = self.tokenizer([prompt], padding="max_length", max_length=16, return_tensors="pt").input_ids
            return self.text_encoder(
                ids.to(self.text_encoder.device), output_hidden_states=True
            ).hidden_states[-2]

    return CogView4(tokenizer(), llama())


def compile_config():
    from transformers.generation.configuration_utils import CompileConfig

    return CompileConfig()


def encoded(pipe):
    """Prompt embeddings, negative ones, and their masks."""
    import torch

    with torch.no_grad():
        return pipe.encode_prompt("w1 w2", negative_prompt="w3", max_sequence_length=16)


def hidden(encoder):
    """The hidden states of ids that are sent to ``encoder.device``."""
    import torch

    with torch.no_grad():
        return encoder(torch.tensor([[2, 5, 6, 3]]).to(encoder.device)).last_hidden_state


def assert_equal(tensors, references):
    import torch

    for tensor, reference in zip(tensors, references, strict=True):
        assert torch.equal(tensor, reference)
