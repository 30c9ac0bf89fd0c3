"""diffusers-balanced-quantized-size and diffusers-balanced-lost-component: ``device_map="balanced"`` of pipelines."""

from __future__ import annotations

import gc
import logging

import pytest

from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

SIZE = "diffusers-balanced-quantized-size"
LOST = "diffusers-balanced-lost-component"
SHOWS = r"dispatched on the CPU|missing 6 required positional|not on a GPU|Cannot copy out of meta|_is_hf_initialized"
METHODS = ("nf4", "nf4-double", "int8", "quanto", "torchao")
PARTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
needs_pipeline_config = "diffusers>=0.34"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("balanced") / "pipeline"
    models.flux_pipeline(text=True, vae=None).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder_with_vae(tmp_path_factory):
    path = tmp_path_factory.mktemp("balanced") / "pipeline"
    models.flux_pipeline(text=True).save_pretrained(path)
    return path


@pytest.fixture
def said():
    """What diffusers logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("diffusers")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def config_of(method: str, library: str = "diffusers"):
    """The quantization config of a component; skips where these releases cannot have it."""
    import importlib

    import diffusers

    if method in ("nf4", "nf4-double"):
        return models.bnb_config(library, bnb_4bit_use_double_quant=method == "nf4-double")
    if method == "int8":
        return models.bnb_config(library, 8)
    if method == "quanto":
        if sentence := unmet("optimum-quanto>=0.2.6"):  # as diffusers says
            pytest.skip(sentence)
        if library == "diffusers":
            if sentence := unmet("diffusers>=0.33"):  # which brought quanto
                pytest.skip(sentence)
            return diffusers.QuantoConfig(weights_dtype="int8")
        return importlib.import_module(library).QuantoConfig(weights="int8")
    torchao = pytest.importorskip("torchao.quantization")
    return importlib.import_module(library).TorchAoConfig(torchao.Int8WeightOnlyConfig())


def load(folder, quantization=None, memory=None, **options):
    """The pipeline; ``quantization`` is a dictionary of component -> config."""
    import torch
    from diffusers import FluxPipeline

    if quantization:
        from diffusers.quantizers import PipelineQuantizationConfig

        options["quantization_config"] = PipelineQuantizationConfig(quant_mapping=quantization)
    if memory is not None:
        options["device_map"] = "balanced"
        options["max_memory"] = dict(enumerate(memory))
    # What was saved as None has to be passed as None.
    options.update({name: None for name in PARTS if not (folder / name).exists()})
    dtype = torch.bfloat16 if "torchao" in str(quantization).lower() else torch.float16
    with four_bit.skip_for_other_reasons():
        pipe = FluxPipeline.from_pretrained(folder, torch_dtype=dtype, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def assert_on_gpus(pipe, *names) -> None:
    for name in names:
        place = pipe.hf_device_map[name]
        assert place in (0, 1), f"{name} is not on a GPU but on {place}: {pipe.hf_device_map}"
        assert {str(one.device) for one in getattr(pipe, name).parameters()} == {f"cuda:{place}"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spelling", [int, str], ids=["bytes", "text"])
@pytest.mark.defect(SIZE, shows=SHOWS, needs=needs_pipeline_config)
def test_a_component_that_fits_once_it_is_quantized(rig_devices, folder, method, spelling):
    """522 880 bytes in half precision, of which a GPU has 450 000 free."""
    import torch

    memory = [450_000, 450_000] if spelling is int else ["450KB", "450KB"]
    pipe = load(folder, {"transformer": config_of(method)}, memory)
    assert_on_gpus(pipe, "transformer", "text_encoder", "text_encoder_2")
    gc.collect()
    assert max(map(rig_devices.allocated, rig_devices.devices)) <= 450_000
    balanced = models.prompt_flux(pipe)
    reference = load(folder, {"transformer": config_of(method)})
    for component in (reference.transformer, reference.text_encoder, reference.text_encoder_2):
        component.to("cuda:0")
    assert torch.equal(balanced.cpu(), models.prompt_flux(reference).cpu())


@pytest.mark.defect(SIZE, shows=SHOWS, needs=(needs_pipeline_config, "transformers>=4.50"))
def test_a_text_encoder_that_fits_once_it_is_quantized(rig_devices, folder):
    """The spelling with one backend for all components."""
    import torch
    from diffusers.quantizers import PipelineQuantizationConfig

    config = PipelineQuantizationConfig(
        quant_backend="bitsandbytes_4bit",
        quant_kwargs={"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float16},
        components_to_quantize=["transformer", "text_encoder_2"],
    )
    pipe = load(folder, memory=[300_000, 300_000], quantization_config=config)
    assert_on_gpus(pipe, "transformer", "text_encoder", "text_encoder_2")
    models.prompt_flux(pipe)


@pytest.mark.defect(SIZE, shows=SHOWS, needs=("diffusers>=0.33", "bitsandbytes>=0.45"))
def test_a_transformer_that_was_saved_quantized(rig_devices, folder, tmp_path):
    from diffusers import FluxTransformer2DModel

    transformer = four_bit.load(FluxTransformer2DModel, folder / "transformer")
    models.flux_pipeline(transformer).save_pretrained(tmp_path)
    assert_on_gpus(load(tmp_path, memory=[450_000, 450_000]), "transformer")


@pytest.mark.defect(SIZE, shows=SHOWS)
def test_a_text_encoder_that_was_saved_quantized(rig_devices, folder, tmp_path):
    from transformers import T5EncoderModel

    encoder = four_bit.load(T5EncoderModel, folder / "text_encoder_2")
    parts = {"vae": None, "text_encoder_2": encoder, "text_encoder": None, "tokenizer": None}
    pipe = models.flux_pipeline(models.flux_transformer(), text=True, **parts)
    pipe.save_pretrained(tmp_path)
    pipe = load(tmp_path, memory=[120_000, 120_000])
    assert_on_gpus(pipe, "text_encoder_2")


def test_what_does_not_fit_is_said(rig_devices, folder, said):
    """On the CPU it is exact; without a word it would only be slow."""
    import torch

    if pytest.importorskip("diffusers").__version__ < "0.34":
        pytest.skip("PipelineQuantizationConfig came with diffusers 0.34")
    from diffusers_quantfix.loading.device import quantizes_on_cpu

    quantization = {"transformer": config_of("nf4")}
    if not quantizes_on_cpu():
        with pytest.raises(ValueError, match="dispatched on the CPU"):
            load(folder, quantization, [100_000, 400_000])
        return
    pipe = load(folder, quantization, [100_000, 100_000])
    assert "finds no GPU with room for transformer" in "".join(said)
    assert pipe.hf_device_map["transformer"] == "cpu"
    reference = load(folder, quantization)
    reference.text_encoder.to("cuda:0"), reference.text_encoder_2.to("cuda:0")
    assert torch.equal(models.prompt_flux(pipe).cpu(), models.prompt_flux(reference).cpu())


def test_nothing_is_left_behind_by_a_load_that_fails(rig_devices, folder):
    """The next pipeline, which is not quantized, is measured as that."""
    from unittest import mock

    if pytest.importorskip("diffusers").__version__ < "0.34":
        pytest.skip("PipelineQuantizationConfig came with diffusers 0.34")
    from diffusers import FluxPipeline

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with mock.patch.object(FluxPipeline, "register_modules", fail), pytest.raises(KeyboardInterrupt):
        load(folder, {"transformer": config_of("nf4")}, [450_000, 450_000])
    assert load(folder, memory=[450_000, 450_000]).hf_device_map["transformer"] == "cpu"


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.parametrize("method", METHODS)
def test_the_size_is_that_of_the_loaded_model(rig_devices, folder, method, library):
    """Not too small, and at most a tenth too large."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import compute_module_sizes
    from diffusers import FluxTransformer2DModel
    from transformers import T5EncoderModel

    from diffusers_quantfix.loading.sizes import shrink

    if method == "quanto" and library == "transformers":
        pytest.skip("transformers keeps the scales apart")
    model_class = FluxTransformer2DModel if library == "diffusers" else T5EncoderModel
    part = folder / ("transformer" if library == "diffusers" else "text_encoder_2")
    dtype = torch.bfloat16 if method == "torchao" else torch.float16
    config = config_of(method, library)
    gc.collect()
    before = rig_devices.allocated("cuda:0")
    with four_bit.skip_for_other_reasons():
        model = model_class.from_pretrained(
            part, quantization_config=config, torch_dtype=dtype, device_map={"": "cuda:0"}
        )
    gc.collect()
    taken = rig_devices.allocated("cuda:0") - before
    said = str(config)
    with init_empty_weights():
        plan = (
            model_class(model_class.config_class.from_pretrained(part))
            if library == "transformers"
            else (model_class.from_config(model_class.load_config(part)))
        )
    plan = plan.to(dtype)
    plain = compute_module_sizes(plan, dtype=dtype)[""]
    layers = shrink(plan, config)
    assert layers > 0
    assert str(config) == said
    measured = compute_module_sizes(plan, dtype=dtype)[""]
    assert model is not None and measured < plain
    # Each 4-bit layer has a table or two of its own, which count in a tiny model only.
    tables = layers * {"nf4": 64, "nf4-double": 1100}.get(method, 0)
    # The older form of int8 weights of torchao has a zero point of 8 bytes for each row.
    tables += sum(8 * len(weight) for weight in model.parameters() if hasattr(weight, "tensor_impl"))
    assert taken <= measured * 1.02 + tables and measured <= taken * 1.15


@pytest.mark.defect(LOST, shows="are lost")
def test_every_component_is_in_the_plan(rig_devices, folder_with_vae):
    import torch

    reference = models.prompt_flux(load(folder_with_vae).to("cuda:0"))
    pipe = load(folder_with_vae, memory=[100_000, 100_000])
    names = {"transformer", "vae", "text_encoder", "text_encoder_2"}
    assert set(pipe.hf_device_map) == names, f"{names - set(pipe.hf_device_map)} are lost"
    assert all(hasattr(getattr(pipe, name), "_hf_hook") for name in names)
    assert torch.equal(models.prompt_flux(pipe).cpu(), reference.cpu())
    image = pipe(
        "w1 w2", height=32, width=32, num_inference_steps=1, max_sequence_length=16, output_type="pt"
    )
    assert torch.isfinite(image.images).all()


@pytest.mark.defect(LOST, shows="are lost")
def test_the_order_is_that_of_the_sizes():
    from diffusers.pipelines.pipeline_loading_utils import _assign_components_to_devices as assign

    sizes = {"a": 9, "b": 8, "c": 3, "d": 2, "e": 1}
    assigned = assign(sizes, {0: 4, 1: 2})
    placed = [name for names in assigned.values() for name in names]
    assert sorted(placed) == list(sizes), f"{set(sizes) - set(placed)} are lost"
    assert assigned == {"cpu": ["a", "b"], 0: ["c"], 1: ["d"], **assigned} and len(placed) == len(sizes)
