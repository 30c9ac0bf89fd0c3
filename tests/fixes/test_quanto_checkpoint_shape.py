"""quanto-checkpoint-shape: a damaged checkpoint of quanto's weights is loaded without an error."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

FIX_ID = "quanto-checkpoint-shape"
# Unpacking may fail as well; that error does not name the tensor.
SHOWS = r"DID NOT RAISE|invalid for input of size|Regex pattern did not match"
NAMES = {
    "qfloat8": ("_data", "_scale"), "qint8": ("_data", "_scale"), "qint4": ("_data._data", "_scale", "_shift"),
    "qint2": ("_data._data", "_scale", "_shift"),
}  # fmt: skip
PARTS = [(qtype, name) for qtype, names in NAMES.items() for name in names]


def requantized(state, model, **options):
    """What ``requantize`` makes of plain layers on meta with the tensors of ``state``."""
    import torch

    with torch.device("meta"):
        loaded = q.plain_layers()
    q.quanto().requantize(loaded, state, q.quanto().quantization_map(model), **options)
    return loaded


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize(("qtype", "name"), PARTS)
def test_another_shape(qtype, name):
    model = q.layers(qtype)
    state = dict(model.state_dict())
    key = f"1.weight.{name}"
    state[key] = state[key][:-1]
    with pytest.raises(RuntimeError, match=rf"size mismatch for {key}"):
        requantized(state, model)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize(("qtype", "name"), PARTS)
def test_a_part_is_missing(qtype, name):
    model = q.layers(qtype)
    state = dict(model.state_dict())
    key = f"1.weight.{name}"
    del state[key]
    with pytest.raises(RuntimeError, match=rf"{key}: missing|{key},.*: missing"):
        requantized(state, model)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_model_class_of_quanto(tmp_path):
    """``QuantizedDiffusersModel.from_pretrained``."""
    diffusers = pytest.importorskip("diffusers")
    q.quanto()
    from optimum.quanto import QuantizedDiffusersModel, qint8
    from safetensors.torch import load_file, save_file

    class Quantized(QuantizedDiffusersModel):
        base_class = diffusers.FluxTransformer2DModel

    place = q.saved_flux(tmp_path / "plain")
    model = Quantized.quantize(diffusers.FluxTransformer2DModel.from_pretrained(place), weights=qint8)
    model.save_pretrained(tmp_path / "quantized")
    assert Quantized.from_pretrained(tmp_path / "quantized").device.type == "cpu"
    file = tmp_path / "quantized" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state["x_embedder.weight._scale"] = state["x_embedder.weight._scale"][:-1].contiguous()
    save_file(state, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"size mismatch for x_embedder\.weight\._scale"):
        Quantized.from_pretrained(tmp_path / "quantized")


@pytest.mark.parametrize("qtype", q.QTYPES)
def test_a_refused_weight_stays_as_it_is(qtype):
    """As with the parameters of torch; what else the checkpoint has is loaded, and nothing is called missing."""
    import torch

    model, loaded = q.layers(qtype), q.layers(qtype)
    before = loaded[1].weight.dequantize()
    state = dict(model.state_dict())
    state["1.weight._scale"] = state["1.weight._scale"][:2] * 2
    with pytest.raises(RuntimeError) as raised:
        loaded.load_state_dict(state)
    assert "size mismatch for 1.weight._scale" in str(raised.value) and "Missing key" not in str(raised.value)
    assert torch.equal(loaded[1].weight.dequantize(), before)


@pytest.mark.parametrize("qtype", q.QTYPES)
def test_layers_of_every_shape_are_loaded(qtype):
    """One row, no group, convolutions, and a layer of which the checkpoint has nothing."""
    import torch

    library = q.quanto()
    torch.manual_seed(0)
    model = torch.nn.ModuleList(
        [
            torch.nn.Linear(256, 1), torch.nn.Linear(100, 6), torch.nn.Linear(256, 48), torch.nn.Conv2d(16, 4, 3),
            torch.nn.Conv2d(32, 1, 1), torch.nn.Linear(64, 64),
        ]
    )  # fmt: skip
    library.quantize(model, weights=getattr(library, qtype))
    library.freeze(model)
    loaded = torch.nn.ModuleList(
        [
            torch.nn.Linear(256, 1), torch.nn.Linear(100, 6), torch.nn.Linear(256, 48), torch.nn.Conv2d(16, 4, 3),
            torch.nn.Conv2d(32, 1, 1), torch.nn.Linear(64, 64),
        ]
    )  # fmt: skip
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("5.")}
    library.requantize(loaded, state, library.quantization_map(model))
    for one, other in list(zip(loaded, model, strict=True))[:-1]:
        assert torch.equal(one.weight.dequantize(), other.weight.dequantize())
    # A layer may be loaded without its weight, and into a frozen one in two parts.
    assert not loaded.load_state_dict(state, strict=False).unexpected_keys
    for key in list(state):
        loaded.load_state_dict({key: state[key]}, strict=False)
    assert torch.equal(loaded[2].weight.dequantize(), model[2].weight.dequantize())


@pytest.mark.parametrize("qtype", q.QTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_the_whole_weight(qtype, shape):
    """As an optimizer of the user gives it, through the arguments of ``quantize``; quanto loads and computes it."""
    import torch

    library = q.quanto()
    affine = qtype in ("qint4", "qint2")

    class Whole(library.MaxOptimizer if affine else library.AbsmaxOptimizer):
        def optimize(self, base, *args, **kwargs):
            made = super().optimize(base.flatten(), *args[:-1], None)
            return tuple(one.reshape(1, 1) for one in made) if affine else made.reshape(1, 1)

    model = q.plain_layers()
    library.quantize(model, weights=getattr(library, qtype), optimizer=Whole())
    library.freeze(model)
    state = dict(model.state_dict())
    for key in [key for key in state if key.endswith(("._scale", "._shift"))]:
        assert state[key].numel() == 1
        state[key] = state[key].reshape(shape)
    loaded = requantized(state, model)
    assert torch.equal(q.run(loaded), q.run(model))


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("qtype", q.QTYPES)
def test_one_number_for_each_row(qtype, dtype, shape, width):
    """quanto computes with them on a CPU in bfloat16, but not elsewhere: in a square weight along the other axis."""
    import torch

    model = q.layers(qtype, getattr(torch, dtype), width)
    state = dict(model.state_dict())
    key = "1.weight._scale" if shape == (1, -1) and width == 256 else "0.weight._scale"
    state["1.weight._scale"] = state["1.weight._scale"].reshape(shape)
    if shape != (1, -1) or width == 128:  # else the first layer is square: see the next test
        state["0.weight._scale"] = state["0.weight._scale"].reshape(shape)
    given = state[key].shape
    with torch.device("meta"):
        loaded = q.plain_layers(getattr(torch, dtype), width)
    q.quanto().requantize(loaded, state, q.quanto().quantization_map(model))
    assert torch.equal(
        q.run(loaded, getattr(torch, dtype), width), q.run(model, getattr(torch, dtype), width)
    )
    for one, other in zip(loaded, model, strict=True):
        assert torch.equal(one.weight.dequantize(), other.weight.dequantize())
    assert state[key].shape == given  # the user's own tensors stay as they are


@pytest.mark.parametrize("rows", [48, 64])
@pytest.mark.parametrize("qtype", ["qfloat8", "qint8", "qint4"])
def test_a_scale_of_the_last_axis(qtype, rows):
    """quanto loads it, and computes with it."""
    import torch

    library = q.quanto()
    model = torch.nn.Sequential(torch.nn.Linear(64, rows)).requires_grad_(False)
    library.quantize(model, weights=getattr(library, qtype))
    layer = model[0]
    scale, shift = layer.optimizer(layer.weight, qtype=layer.weight_qtype, axis=-1), None
    if qtype == "qint4":
        scale, shift = scale
    weight = library.quantize_weight(layer.weight, layer.weight_qtype, axis=-1, scale=scale, shift=shift)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert layer.weight._scale.shape == (1, 64)
    with torch.device("meta"):
        loaded = torch.nn.Sequential(torch.nn.Linear(64, rows))
    library.requantize(loaded, model.state_dict(), library.quantization_map(model))
    assert torch.equal(loaded[0].weight.dequantize(), layer.weight.dequantize())
    assert torch.equal(q.run(loaded, width=64), q.run(model, width=64))


@pytest.mark.long
def test_the_library_is_imported_first(tmp_path):
    """Its probe may run in the middle of another one's, which imports what both need."""
    q.quanto()
    result = q.script(
        "import torch, optimum.quanto, sys\n"
        "[sys.modules.pop(name) for name in list(sys.modules) if 'tensor.weights.marlin' in name]\n"
        "import diffusers_quantfix\n"
        "print(diffusers_quantfix.status('quanto-checkpoint-shape'))",
        DIFFUSERS_QUANTFIX="",
        DIFFUSERS_QUANTFIX_AUTO="0",
    )
    assert "was not installed" not in result.stderr, result.stderr
