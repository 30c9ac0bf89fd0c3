"""diffusers-gguf-kept-modules: modules of a GGUF model that stay in float32, or are not to be converted."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.fixes import gguf_models
from tests.gate import unmet

FIX_ID = "diffusers-gguf-kept-modules"
SHOWS = r"RuntimeError: mat1 and mat2 must have the same dtype, but got Byte and (Float|BFloat16|Half)"

torch = pytest.importorskip("torch")

wan = pytest.mark.skipif(
    bool(unmet("diffusers>=0.33.0")), reason="this diffusers reads no Wan from a single file"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def linear(model) -> dict:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}


def plain(model) -> set[str]:
    """The names of the linear layers that are not packed."""
    return {name for name, layer in linear(model).items() if type(layer) is torch.nn.Linear}


@wan
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Q4_0", "bfloat16"),
        ("Q4_0", "float16"),
        ("Q4_0", "float32"),
        ("Q8_0", "bfloat16"),
        ("BF16", "bfloat16"),
    ],
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_wan(tmp_path, kind, dtype):
    """As with a file that has the same weights of the time embedder in float32."""
    dtype = getattr(torch, dtype)
    reference = gguf_models.wan(tmp_path / "reference", dtype, "time_embedder", kind)
    model = gguf_models.wan(tmp_path / "packed", dtype, kind=kind)
    output = gguf_models.run_wan(model)
    assert torch.equal(output, gguf_models.run_wan(reference))
    assert output.dtype == dtype
    assert plain(model) == plain(reference) == {
        name for name in linear(model) if ".time_embedder." in f".{name}"
    }  # fmt: skip
    dtypes = [{name: tensor.dtype for name, tensor in one.state_dict().items()} for one in (model, reference)]
    assert dtypes[0] == dtypes[1]


@wan
def test_wan_under_sequential_offload(gpu, tmp_path):
    from accelerate import cpu_offload

    device = gpu.devices[0]
    reference = gguf_models.run_wan(gguf_models.wan(tmp_path, torch.bfloat16).to(device), device)
    model = gguf_models.wan(tmp_path, torch.bfloat16)
    cpu_offload(model, device)
    for _ in range(2):
        assert torch.equal(gguf_models.run_wan(model, device), reference)
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("names", "inside"),
    [
        (("x_embedder",), "x_embedder"),
        (("linear_1",), "linear_1"),
        (("time_text_embed", "x_embedder"), "time_text_embed|x_embedder"),
        (("transformer_blocks", "x_embedder"), "transformer_blocks|x_embedder"),
    ],
)
@pytest.mark.defect(
    FIX_ID, shows=r"RuntimeError: self and mat2 must have the same dtype, but got Float and Byte"
)
def test_what_is_not_to_be_converted(folder, names, inside):
    """The numbers are those of the model that is packed as a whole: it dequantizes in float32 as well."""
    reference = gguf_models.run(gguf_models.transformer(folder))
    model = gguf_models.transformer(folder, plain=list(names))
    assert torch.equal(gguf_models.run(model), reference)
    assert plain(model) == {name for name in linear(model) if set(inside.split("|")) & set(name.split("."))}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.uint8}


@pytest.mark.defect(FIX_ID, shows="AssertionError: packed layers")
def test_a_module_that_a_model_keeps_in_float32(folder):
    import diffusers

    with mock.patch.object(diffusers.FluxTransformer2DModel, "_keep_in_fp32_modules", ["time_text_embed"]):
        model = gguf_models.transformer(folder, compute_dtype=torch.bfloat16)
    layers = linear(model.time_text_embed).values()
    assert {type(layer) for layer in layers} == {torch.nn.Linear}, "packed layers"
    # 0.32 keeps nothing in float32 but for float16.
    dtype = torch.bfloat16 if unmet("diffusers>=0.33.0") else torch.float32
    assert {parameter.dtype for parameter in model.time_text_embed.parameters()} == {dtype}
    assert plain(model) == {f"time_text_embed.{name}" for name in linear(model.time_text_embed)}


def test_a_second_load_and_a_dequantized_model(folder):
    for _ in range(2):
        model = gguf_models.transformer(folder, plain=["time_text_embed"])
        assert plain(model.time_text_embed) == set(linear(model.time_text_embed))
    reference = gguf_models.run(model)
    with mock.patch.object(type(model), "device", torch.device("meta")):  # else it goes to an accelerator
        model = model.dequantize() or model
    assert not gguf_models.weights_of(model)
    assert torch.equal(gguf_models.run(model), reference)


def test_without_such_modules_nothing_changes(folder):
    model = gguf_models.transformer(folder)
    assert not plain(model)
    assert {type(layer.weight).__name__ for layer in linear(model).values()} == {"GGUFParameter"}
