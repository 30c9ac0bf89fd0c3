"""diffusers-shared-quantization-config: one quantization config with a list of skipped modules for several models."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict

import pytest

from diffusers_quantfix.fixes.diffusers import shared_quantization_config
from tests.fixes import four_bit, gguf_models
from tests.fixes import quanto_models as q
from tests.fixes import torchao_models as ao
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

PRETRAINED, SINGLE_FILE = "diffusers-pretrained-config", "diffusers-single-file-config"
SHOWS = r"the list is \['proj_out', .*norm1"
BACKENDS = ("4-bit", "8-bit", "quanto", "torchao")


def config(backend: str, skipped: list[str] | None):
    """The config of a backend with a list of modules to skip; skips the test where diffusers has none."""
    import diffusers

    if backend in ("4-bit", "8-bit"):
        pytest.importorskip("bitsandbytes")
        return models.bnb_config("diffusers", int(backend[0]), llm_int8_skip_modules=skipped)
    if backend == "quanto":
        q.quanto()
        if q.unsupported():
            pytest.skip(q.unsupported())
        return diffusers.QuantoConfig(weights_dtype="int8", modules_to_not_convert=skipped)
    if sentence := unmet("diffusers>=0.40"):
        pytest.skip(f"before, diffusers keeps nothing in float32 beside torchao's weights; {sentence}")
    return diffusers.TorchAoConfig(ao.config("int8"), modules_to_not_convert=skipped)


def list_of(config) -> list[str]:
    return vars(config).get("llm_int8_skip_modules") or vars(config).get("modules_to_not_convert")


def kinds():
    """The transformer of Flux, and one that keeps its first norms in float32."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel, type(
        "Kept",
        (FluxTransformer2DModel,),
        {"_keep_in_fp32_modules": ["norm1"], "__module__": FluxTransformer2DModel.__module__},
    )


def load(kind, folder, config):
    """A model on the first device, or on the CPU for what is quantized there."""
    with four_bit.skip_for_other_reasons():
        return kind.from_pretrained(folder, quantization_config=config, torch_dtype=torch.float16)


def quantized(model) -> set[str]:
    """The names of its weights that are not plain."""
    return {
        name
        for name, weight in model.named_parameters()
        if type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.defect(PRETRAINED, shows=SHOWS)
def test_two_models(gpu, tmp_path, backend):
    folder = models.saved(models.flux_transformer(), tmp_path)
    plain, kept = kinds()
    own = ["proj_out"]
    shared = config(backend, own)
    second = load(kept, folder, shared)
    for skipped in (own, list_of(shared)):
        assert skipped == ["proj_out"], f"the list is {skipped}"
    third = load(plain, folder, shared)
    alone = load(plain, folder, config(backend, ["proj_out"]))
    assert quantized(third) == quantized(alone) > quantized(second)
    assert list_of(second.config.quantization_config) == ["proj_out", "norm1"]
    assert list_of(third.config.quantization_config) == list_of(alone.config.quantization_config)


@pytest.mark.defect(SINGLE_FILE, shows=SHOWS)
def test_from_a_single_file(tmp_path, monkeypatch):
    """GGUF: the list is an attribute only."""
    gguf_models.transformer(tmp_path)  # writes the file; skips where there is none
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig
    from diffusers.loaders import single_file_model

    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    monkeypatch.setitem(entry, "checkpoint_mapping_fn", lambda checkpoint, **_: checkpoint)
    monkeypatch.setattr(FluxTransformer2DModel, "_keep_in_fp32_modules", ["norm1"])
    shared = GGUFQuantizationConfig(compute_dtype=torch.float16)
    shared.modules_to_not_convert = own = ["proj_out"]
    model = FluxTransformer2DModel.from_single_file(
        str(tmp_path / "model.gguf"),
        config=str(tmp_path),
        quantization_config=shared,
        torch_dtype=torch.float16,
    )
    assert gguf_models.weights_of(model)
    for skipped in (own, shared.modules_to_not_convert):
        assert skipped == ["proj_out"], f"the list is {skipped}"


@pytest.mark.parametrize("backend", ["4-bit", "quanto"])
@pytest.mark.defect(PRETRAINED, shows=SHOWS)
def test_a_dict(gpu, tmp_path, backend):
    folder = models.saved(models.flux_transformer(), tmp_path)
    shared = config(backend, ["proj_out"]).to_dict()
    if backend == "quanto":
        shared |= {"quant_method": "quanto"}
    name = next(name for name, value in shared.items() if value == ["proj_out"])
    load(kinds()[1], folder, shared)
    assert shared[name] == ["proj_out"], f"the list is {shared[name]}"


def test_a_class_that_cannot_be_copied(gpu, tmp_path):
    base = type(config("8-bit", ["proj_out"]))

    class Own(base):
        def __new__(cls, about=None, *args, **kwargs):
            assert about
            return object.__new__(cls)

        def __init__(self, about, **kwargs):
            super().__init__(**kwargs)
            self.about = about

        def __getstate__(self):
            return {"about": self.about}

    folder = models.saved(models.flux_transformer(), tmp_path)
    own = Own("mine", load_in_8bit=True, llm_int8_skip_modules=["proj_out"])
    model = load(kinds()[1], folder, own)
    assert own.llm_int8_skip_modules == ["proj_out"]
    assert type(model.config.quantization_config) is Own
    assert quantized(model)


def test_a_class_with_slots(gpu, tmp_path):
    """Before: the copy had none of their values."""

    class Own(type(config("8-bit", ["proj_out"]))):
        __slots__ = ("__private", "about", "unset")

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.about = self.__private = "mine"

        def to_dict(self):
            assert self.about == self.__private == "mine"
            return super().to_dict()

    folder = models.saved(models.flux_transformer(), tmp_path)
    own = Own(load_in_8bit=True, llm_int8_skip_modules=["proj_out"])
    model = load(kinds()[1], folder, own)
    assert own.llm_int8_skip_modules == ["proj_out"]
    assert model.config.quantization_config.to_dict()
    assert not hasattr(model.config.quantization_config, "unset")
    assert quantized(model)


class NotCopied(dict):
    def __copy__(self):
        raise TypeError("no copies")


class ItsOwnCopy(dict):
    def __copy__(self):
        return self


class NotUpdated(dict):
    def update(self, *args, **kwargs):
        raise TypeError("no changes")


class OwnList(list):
    pass


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict, NotCopied, ItsOwnCopy, NotUpdated])
def test_the_class_of_a_dict(kind):
    given = (functools.partial(defaultdict, list) if kind is defaultdict else kind)(skipped=OwnList(["one"]))
    copied = shared_quantization_config._with_own_lists(given)
    assert copied == given and copied["skipped"] is not given["skipped"]
    assert type(copied) is (dict if kind in (NotCopied, ItsOwnCopy, NotUpdated) else kind)
    assert type(copied["skipped"]) is OwnList
    if kind is defaultdict:
        assert copied["other"] == []


def test_a_class_that_derives_from_a_builtin_type():
    class Own(str):
        pass

    given = Own("mine")
    given.skipped = ["one"]
    assert shared_quantization_config._with_own_lists(given) is given


def test_a_config_without_a_list_is_passed_on(gpu, tmp_path):
    folder = models.saved(models.flux_transformer(), tmp_path)
    one = config("8-bit", None)
    assert load(kinds()[0], folder, one).config.quantization_config is one


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_and_loaded(gpu, tmp_path, backend):
    """The checkpoint knows what was left out."""
    folder = models.saved(models.flux_transformer(), tmp_path / "plain")
    kept = kinds()[1]
    model = load(kept, folder, config(backend, ["proj_out"]))
    assert list_of(model.config.quantization_config) == ["proj_out", "norm1"]
    if backend == "torchao" or unmet("diffusers>=0.33"):
        return
    model.save_pretrained(tmp_path / "quantized")
    with four_bit.skip_for_other_reasons():
        again = kept.from_pretrained(tmp_path / "quantized", torch_dtype=torch.float16)
    assert quantized(again) == quantized(model)
