"""diffusers-single-file-quantize: from_single_file of an ordinary file, which is to be quantized."""

from __future__ import annotations

import pytest

from tests.fixes import torchao_models as ao
from tests.fixes.test_diffusers_single_file_device import video_transformer
from tests.gate import unmet
from tests.rig import models
from tests.sweep.backends import ALL_BACKENDS, installed

FIX_ID = "diffusers-single-file-quantize"
SHOWS = r"is not quantized|Missing quantization component|does not contain `bitsandbytes__|Cannot copy out of meta"
LAYER = "transformer_blocks.0.attn1.to_q"
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.32")), reason="from_single_file takes no quantization_config"
)
# From where on from_pretrained quantizes with them
NEEDS = {
    "bnb": ("diffusers>=0.32",),
    "quanto": ("diffusers>=0.33", "optimum-quanto>=0.2.6"),
    "torchao": ("diffusers>=0.37", "torchao>=0.15"),
}
KINDS = [name for name in ALL_BACKENDS if name.partition("-")[0] in NEEDS]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SOME_KINDS = pytest.mark.parametrize("kind", ["bnb-nf4", "bnb-int8", "quanto-int8", "torchao-int8"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a plain model, which is a folder and a single file."""
    import torch

    return models.saved(video_transformer().to(torch.bfloat16), tmp_path_factory.mktemp("plain"))


def skip_where_it_is_missing(kind: str) -> None:
    if not installed(kind):
        pytest.skip(f"no library for {kind}")
    for requirement in NEEDS[kind.partition("-")[0]]:
        if sentence := unmet(requirement):
            pytest.skip(sentence)


def load(source, folder, kind, **options):
    """The model of the file, with the configuration with which ``kind`` loads the folder."""
    import torch

    return type(video_transformer()).from_single_file(
        source,
        config=str(folder),
        quantization_config=ALL_BACKENDS[kind].make(torch.bfloat16),
        torch_dtype=torch.bfloat16,
        **options,
    )


def file_of(folder) -> str:
    return str(folder / "diffusion_pytorch_model.safetensors")


def weights_of(model) -> dict:
    """The bytes of every tensor of the state dict, those of quanto and torchao dequantized."""
    import torch

    return {
        name: (tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor)
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        for name, tensor in model.state_dict().items()
        # the scales of activations, which are not quantized: one, in another dtype
        if isinstance(tensor, torch.Tensor) and not name.endswith(("input_scale", "output_scale"))
    }


def assert_as_by_from_pretrained(model, folder, kind) -> None:
    import torch

    found = type(model.get_submodule(LAYER).weight)
    assert found is not torch.nn.Parameter, "the model is not quantized"
    expected = ALL_BACKENDS[kind](folder, torch.bfloat16, model_class=type(model))
    wanted = type(expected.get_submodule(LAYER).weight)
    assert found is wanted, f"{found.__name__}, not {wanted.__name__}"
    found, wanted = weights_of(model), weights_of(expected)
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


@EVERY_KIND
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_quantized_as_by_from_pretrained(gpu, folder, kind):
    skip_where_it_is_missing(kind)
    device = {"device": "cuda:0"} if kind.startswith("bnb") else {}
    assert_as_by_from_pretrained(load(file_of(folder), folder, kind, **device), folder, kind)


@SOME_KINDS
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_without_a_device(gpu, folder, kind):
    """It may quantize where it is moved to, as older releases of bitsandbytes do."""
    skip_where_it_is_missing(kind)
    model = load(file_of(folder), folder, kind).to("cuda:0")
    assert_as_by_from_pretrained(model, folder, kind)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("spelling", ["keyword", "state dict"])
def test_each_spelling(gpu, folder, spelling):
    import safetensors.torch

    source = safetensors.torch.load_file(file_of(folder)) if spelling == "state dict" else file_of(folder)
    model = load(source, folder, "bnb-nf4", device="cuda:0")
    assert_as_by_from_pretrained(model, folder, "bnb-nf4")


@SOME_KINDS
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_saved_and_loaded(gpu, folder, tmp_path, kind):
    import torch

    skip_where_it_is_missing(kind)
    device = {"device": "cuda:0"} if kind.startswith("bnb") else {}
    model = load(file_of(folder), folder, kind, **device)
    assert type(model.get_submodule(LAYER).weight) is not torch.nn.Parameter, "the model is not quantized"
    with ao.skipped_where_not_saved():
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    found, wanted = weights_of(again), weights_of(model)
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_after_a_load_that_ended(gpu, folder, monkeypatch):
    from diffusers.loaders import single_file_model

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(single_file_model, "load_model_dict_into_meta", stop)
        load(file_of(folder), folder, "bnb-int8", device="cuda:0")
    model = load(file_of(folder), folder, "bnb-int8", device="cuda:0")
    assert_as_by_from_pretrained(model, folder, "bnb-int8")


def test_what_is_no_plain_file():
    import torch

    from diffusers_quantfix.fixes.diffusers.single_file_quantize import is_plain

    plain = {
        "a.weight": torch.zeros(2, 2),
        "a.bias": torch.zeros(2),
        "ids": torch.zeros(1, dtype=torch.int64),
    }
    assert all(is_plain(plain, method) for method in ("bitsandbytes", "quanto", "torchao"))
    assert not any(is_plain(plain, method) for method in ("gguf", "bfl", "sdnq", ""))
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        assert not is_plain({**plain, "b.weight": torch.zeros(2, 2).to(dtype)}, "bitsandbytes")
    for name, method in (
        ("a.weight.absmax", "bitsandbytes"),
        ("a.SCB", "bitsandbytes"),
        ("a.weight._data", "quanto"),
        ("a._weight_qdata", "torchao"),
    ):
        assert not is_plain({**plain, name: torch.zeros(2)}, method)
