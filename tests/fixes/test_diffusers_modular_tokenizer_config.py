"""diffusers-modular-tokenizer-config: one quantization config for all components of a modular pipeline."""

from __future__ import annotations

import contextlib

import pytest

from tests.fixes import quanto_models as q
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.modular_pipelines", reason="modular pipelines came with diffusers 0.35")

FIX_ID = "diffusers-modular-tokenizer-config"
SHOWS = r"Object of type \w+Config is not JSON serializable"
NAMES = ["transformer", "tokenizer"]


def pipeline(folder):
    """A modular pipeline with a model and a tokenizer, from their folders; nothing is loaded yet."""
    from diffusers import FluxTransformer2DModel
    from diffusers.modular_pipelines import ComponentSpec, ModularPipelineBlocks
    from transformers import PreTrainedTokenizerFast

    for name, part in (("transformer", models.flux_transformer()), ("tokenizer", models.tokenizer())):
        part.save_pretrained(folder / name)

    fields = ComponentSpec.__dataclass_fields__
    place = "repo" if "repo" in fields else "pretrained_model_name_or_path"  # the name before diffusers 0.36

    class Blocks(ModularPipelineBlocks):
        model_name = "flux"

        @property
        def expected_components(self):
            return [
                ComponentSpec(name=name, type_hint=kind, **{place: str(folder / name)})
                for name, kind in zip(NAMES, (FluxTransformer2DModel, PreTrainedTokenizerFast), strict=True)
            ]

    return Blocks().init_pipeline()


def assert_tokenizer_is_saved(pipe, folder) -> None:
    from transformers import PreTrainedTokenizerFast

    pipe.tokenizer.save_pretrained(folder)
    text = "w1 w2"
    assert PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids == pipe.tokenizer(text).input_ids


def given(config, how):
    """As load_components takes it: for all, or for those that are not named."""
    return config if how == "one" else {"default": config}


@pytest.mark.parametrize("how", ["one", "default"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_saved_after_it_was_quantized(tmp_path, how):
    from diffusers import QuantoConfig

    q.quanto()
    pipe = pipeline(tmp_path)
    pipe.load_components(NAMES, quantization_config=given(QuantoConfig(weights_dtype="int8"), how))
    assert any(type(weight).__name__ == "WeightQBytesTensor" for weight in pipe.transformer.parameters())
    assert_tokenizer_is_saved(pipe, tmp_path / "saved")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_one_component_by_its_specification(tmp_path):
    from diffusers import BitsAndBytesConfig

    pipe = pipeline(tmp_path)
    spec = pipe._component_specs["tokenizer"]
    pipe.tokenizer = spec.load(quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert_tokenizer_is_saved(pipe, tmp_path / "saved")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_one_that_an_auto_class_finds(tmp_path):
    """Its type is the auto class."""
    from diffusers import BitsAndBytesConfig
    from transformers import AutoTokenizer

    pipe = pipeline(tmp_path)
    spec = pipe._component_specs["tokenizer"]
    spec.type_hint = AutoTokenizer
    pipe.tokenizer = spec.load(quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert_tokenizer_is_saved(pipe, tmp_path / "saved")


def test_all_others_get_it(tmp_path):
    """What is no model may load one: auto classes, whole pipelines, a class of the user's."""
    import transformers
    from diffusers import DiffusionPipeline

    spec = pipeline(tmp_path)._component_specs["tokenizer"]
    processor = transformers.ProcessorMixin
    for base in (object, transformers.AutoModel, DiffusionPipeline, torch.nn.Module, processor):
        given: list[dict] = []

        def from_pretrained(*args, given=given, **options):
            given.append(options)

        spec.type_hint = type("Loader", (base,), {"from_pretrained": from_pretrained})
        with contextlib.suppress(AttributeError):  # `load` gives what it has loaded an id
            spec.load(quantization_config="config")
        assert [one["quantization_config"] for one in given] == ["config"], base


def test_a_class_of_the_users_that_transformers_loads(tmp_path):
    """Which keeps it as its base does."""
    from diffusers import BitsAndBytesConfig
    from transformers import PreTrainedTokenizerFast

    pipe = pipeline(tmp_path)
    spec = pipe._component_specs["tokenizer"]
    spec.type_hint = type("Own", (PreTrainedTokenizerFast,), {})
    pipe.tokenizer = spec.load(quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert_tokenizer_is_saved(pipe, tmp_path / "saved")


def test_without_a_config_as_before(tmp_path):
    pipe = pipeline(tmp_path)
    pipe.load_components(NAMES)
    assert not any(type(weight) is not torch.nn.Parameter for weight in pipe.transformer.parameters())
    assert_tokenizer_is_saved(pipe, tmp_path / "saved")
