"""torchao-module-pickle: models with weights of torchao cannot be pickled."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import re
import subprocess
import sys
import types
import weakref

import pytest

from diffusers_quantfix.verify.models import flux
from tests.fixes import mapped
from tests.fixes import torchao_models as ao
from tests.fixes.spawned import assert_arrives
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")

TARGET = "torchao-layer-pickle"
SHOWS = "'functools.partial' object has no attribute '__name__'|'Linear' object has no attribute '_linear_extra_repr'"


@pytest.mark.defect(TARGET, shows=SHOWS, needs="torchao>=0.9")
@pytest.mark.parametrize("weights", (*ao.WEIGHTS, "int4"))
def test_torch_save(weights):
    if weights == "int4" and unmet("torchao>=0.14"):
        pytest.skip("there is no such config before")
    model = ao.layers(weights)
    twin = mapped.reloaded(model, None)
    assert torch.equal(ao.run(twin), ao.run(model))
    assert type(twin[0].weight) is type(model[0].weight)
    assert torch.equal(ao.run(mapped.reloaded(twin, None)), ao.run(model)), "a second time"


@pytest.mark.defect(TARGET, shows=SHOWS, needs="torchao>=0.9")
def test_pickle():
    model = ao.layers("int8")
    assert torch.equal(ao.run(pickle.loads(pickle.dumps(model))), ao.run(model))


@pytest.mark.long
def test_another_process_without_this_package_reads_it(tmp_path):
    model = ao.layers("int8")
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "assert 'diffusers_quantfix' not in sys.modules\n"
        "print(float(model(torch.ones(1, 64, dtype=torch.bfloat16)).sum()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "model.pt"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == float(model(torch.ones(1, 64, dtype=torch.bfloat16)).sum())


class ByObject(pickle.Pickler):
    """Stores a method as its function and its object, as cloudpickle and dill do."""

    def reducer_override(self, value):
        if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
            return bound, (value.__func__, value.__self__)
        return NotImplemented


def bound(function, owner):
    return types.MethodType(function, owner)


def test_cloudpickle_stores_nothing_of_this_package(tmp_path):
    model = ao.layers("int8")
    stored = io.BytesIO()
    ByObject(stored).dump(model)
    assert b"diffusers_quantfix" not in stored.getvalue()
    twin = pickle.loads(stored.getvalue())
    assert repr(twin) == repr(model) == repr(copy.deepcopy(twin))
    assert torch.equal(ao.run(pickle.loads(pickle.dumps(twin))), ao.run(model)), "stored by pickle later"
    one = model[0].__dict__.get("extra_repr")
    for copied in (copy.copy, copy.deepcopy):
        assert one is None or copied(one.__func__)(model[0]) == one()


def run_there(inbox, outbox, model):
    """In a child: the model that the process was given, and the one in the queue."""
    for one in (model, inbox.get()):
        outbox.put(ao.run(one).float().tolist())


@pytest.mark.long
@pytest.mark.defect(TARGET, shows=SHOWS, needs="torchao>=0.15")  # before, the child cannot read it, and waits
def test_a_process_that_is_spawned():
    """As its argument, and through a queue."""
    context = multiprocessing.get_context("spawn")
    assert torch.multiprocessing.get_context("spawn") is context, "what holds for one holds for the other"
    model = ao.layers("int8")
    assert_arrives(context, run_there, model, ao.run(model).float().tolist())


LOADERS = (
    ("torchao-pickle-diffusers", "diffusers>=0.32"),
    ("torchao-pickle-transformers", "transformers>=5"),
)


def loaded_by(target: str, *needs: str):
    """The library of a target, as the parameter of a test that shows its defect."""
    library = needs[0].partition(">")[0]
    return pytest.param(library, marks=pytest.mark.defect(target, shows=SHOWS, needs=list(needs)), id=target)


def checkpoint(library: str, folder, weights: str = "int8"):
    """A model of diffusers or transformers from its quantized checkpoint."""
    whole = flux.transformer() if library == "diffusers" else models.clip_text()
    TorchAoConfig = pytest.importorskip(library).TorchAoConfig
    options = {"torch_dtype": torch.bfloat16}
    first = type(whole).from_pretrained(
        models.saved(whole, folder / "plain"),
        quantization_config=TorchAoConfig(ao.config(weights)),
        **options,
    )
    safe = library == "transformers" and not unmet("transformers>=5")
    first.save_pretrained(folder / "quantized", safe_serialization=safe)
    model = type(whole).from_pretrained(
        folder / "quantized", **({} if safe else {"use_safetensors": False}), **options
    )
    assert "extra_repr" in str([vars(part).keys() for part in model.modules()]), (
        "upstream sets no text any more"
    )
    return model.eval()


def answer(model):
    with torch.no_grad():
        if type(model).__name__ == "FluxTransformer2DModel":
            values = flux.inputs().items()
            return model(**{name: value.bfloat16() for name, value in values}, return_dict=False)[0]
        return model(torch.arange(3, 9)[None])[0]


@pytest.mark.parametrize("weights", ao.WEIGHTS)
@pytest.mark.parametrize("library", [loaded_by(*one) for one in LOADERS])
def test_a_model_from_a_quantized_checkpoint(tmp_path, library, weights):
    """In every way that stores it; the text of its layers stays."""
    with ao.skipped_where_not_saved():
        model = checkpoint(library, tmp_path, weights)
    texts = repr(model)
    assert "weight=" in texts
    for twin in (mapped.reloaded(model, None), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(answer(twin), answer(model))
        assert torch.equal(answer(mapped.reloaded(twin, None)), answer(model)), "a second time"
    assert repr(model) == repr(copy.deepcopy(model)) == texts


KEPT = "weights of the original are still in memory"


@pytest.mark.defect(
    TARGET, shows=KEPT, needs="torchao>=0.17"
)  # before, most layers had a method of a function
@pytest.mark.parametrize("weights", ao.WEIGHTS)
def test_a_deep_copy_keeps_nothing_of_the_original(weights):
    model = ao.layers(weights)
    expected, before = ao.run(model), [weakref.ref(layer.weight) for layer in model]
    twin = copy.deepcopy(model)
    assert repr(twin) == repr(model)
    del model
    gc.collect()
    left = sum(one() is not None for one in before)
    assert not left, f"{left} weights of the original are still in memory"
    assert torch.equal(ao.run(twin), expected)
    stored = io.BytesIO()
    ByObject(stored).dump(twin)
    assert b"diffusers_quantfix" not in stored.getvalue()
    assert repr(pickle.loads(stored.getvalue())) == repr(twin)
    twin[0].in_features = 7
    assert "in_features=7" in repr(twin[0])


@pytest.mark.defect("torchao-pickle-mx", shows=SHOWS)
def test_four_bits_of_nvidia(tmp_path):
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    quantize_(model, formats.NVFP4WeightOnlyConfig())
    twin = mapped.reloaded(model, None)
    assert torch.equal(ao.run(twin), ao.run(model))
    assert type(twin[0].weight) is type(model[0].weight)
    assert torch.equal(ao.run(mapped.reloaded(twin, None)), ao.run(model)), "a second time"
    assert "NVFP4" in repr(model) == repr(copy.deepcopy(model))


def test_a_layer_whose_text_cannot_be_made():
    class Odd(torch.nn.Linear):
        def extra_repr(self):
            raise RuntimeError("no text")

    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(Odd(64, 64).bfloat16())
    quantization.quantize_(model, ao.config("int8"))
    assert type(model[0].weight) is not torch.nn.Parameter


@pytest.mark.parametrize("who", ["another layer", "no layer"])
def test_a_layer_whose_text_another_object_makes(who):
    """Before: it was asked of the layer itself."""

    class Describer:
        text = "described"

        def describe(self):
            return self.text

    quantization = pytest.importorskip("torchao.quantization")
    model, other = (torch.nn.Sequential(torch.nn.Linear(64, 64).bfloat16()) for _ in range(2))
    other[0].in_features = 7
    model[0].extra_repr = other[0].extra_repr if who == "another layer" else Describer().describe
    expected = model[0].extra_repr()
    quantization.quantize_(model, ao.config("int8"))
    if "extra_repr" not in vars(model[0]) or unmet("torchao>=0.15"):
        pytest.skip("this torchao does not ask for the text of before")
    assert expected in repr(model)
    assert expected in repr(copy.deepcopy(model))


def test_the_text_of_a_layer_stays():
    layer = ao.layers("int8")[0]
    assert re.search("Int8Tensor|AffineQuantizedTensor", repr(layer))
    assert repr(copy.deepcopy(layer)) == repr(layer)


@pytest.mark.defect(TARGET, shows=SHOWS, needs=["torchao>=0.9", "torchao<0.17"])
def test_a_config_whose_module_imports_the_function():
    """torchao 0.16 has moved it: ``quant_api`` imports both that module and the function."""
    quantization = pytest.importorskip("torchao.quantization")
    config = getattr(quantization, "Int8DynamicActivationInt4WeightConfig", None)
    if config is None:
        pytest.skip("this torchao has no such config")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    quantization.quantize_(model, config(group_size=32))
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(ao.run(twin), ao.run(model))
    assert type(twin[0].weight) is type(model[0].weight)
