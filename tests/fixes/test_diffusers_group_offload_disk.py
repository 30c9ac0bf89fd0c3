"""diffusers-group-offload-disk: a model that is group-offloaded to disk is saved as uninitialised memory."""

from __future__ import annotations

import functools
import gc

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, LEAF, STREAM, assert_left, net, offload, stop
from tests.fixes.test_diffusers_group_offload_bnb import build, load, output, run
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.34")), reason="to disk from diffusers 0.34 on")

FIX_ID = "diffusers-group-offload-disk"
NOISE = r"not the weights|differ"
named_by_group = pytest.mark.skipif(
    bool(unmet("diffusers>=0.35")), reason="before 0.35 every process has file names of its own"
)
levels = pytest.mark.parametrize("level", [LEAF, BLOCK], ids=["leaf", "block"])


def plain():
    """Two blocks, a layer of neither, a buffer, and a parameter of the root."""

    def linear(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(64, 64)

    model = net(linear)
    model.blocks.append(torch.nn.Sequential(torch.nn.BatchNorm1d(64)))
    return model.eval()


def on_disk(model, folder, device, **mode):
    # What the offload leaves in memory may happen to be what was there: it is overwritten before that.
    offload(model, device, mode | {"offload_to_disk_path": str(folder)})
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
    return model


def assert_same(state, expected) -> None:
    assert state.keys() == expected.keys()
    wrong = [name for name, tensor in expected.items() if not torch.equal(state[name].cpu(), tensor.cpu())]
    assert not wrong, f"not the weights: {wrong}"


@levels
@pytest.mark.defect(FIX_ID, shows=NOISE)
def test_the_state_dict_has_the_weights(gpu, tmp_path, level):
    device = gpu.devices[0]
    expected = {name: tensor.clone() for name, tensor in plain().state_dict().items()}
    model = on_disk(plain(), tmp_path, device, **level)
    inputs = torch.ones(2, 64)
    for _ in range(2):
        assert_same(model.state_dict(), expected)
        assert_same(model.blocks[1].state_dict(prefix="x."), _prefixed(plain().blocks[1].state_dict(), "x."))
        assert torch.equal(model(inputs.to(device)).cpu(), plain()(inputs))
    kept = model.state_dict(keep_vars=True)
    assert kept["first.weight"] is model.first.weight


def _prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize("mode", [LEAF, BLOCK | STREAM], ids=["leaf", "block-stream"])
@pytest.mark.defect(FIX_ID, shows=NOISE)
def test_a_model_is_saved(gpu, tmp_path, mode):
    save_and_load(gpu, tmp_path, 0, mode)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", [LEAF, BLOCK | STREAM], ids=["leaf", "block-stream"])
def test_a_quantized_model_is_saved(gpu, tmp_path, bits, mode):
    save_and_load(gpu, tmp_path, bits, mode)


def save_and_load(gpu, tmp_path, bits, mode) -> None:
    import diffusers

    device = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path / "flux")
    first = flux(folder, bits, device)
    expected, saved = output(first, device), four_bit.state_of(first)
    model = on_disk(flux(folder, bits, device), tmp_path / "groups", device, **mode)
    for place in ("before", "after"):
        model.save_pretrained(tmp_path / place)
        again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / place, torch_dtype=torch.float16)
        assert four_bit.differences(four_bit.state_of(again), saved) == [], "tensors differ"
        assert torch.equal(output(again.to(device), device), expected)
        assert torch.equal(output(model, device), expected)


def flux(folder, bits, device):
    if bits:
        return load("flux", {"flux": folder}, bits)
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float16).to(device)


@levels
@pytest.mark.parametrize("weights", ["4-bit", "4-bit double", "8-bit"])
def test_without_the_hooks_it_is_an_ordinary_model(gpu, tmp_path, level, weights):
    device = gpu.devices[0]
    build(weights, device)  # old bitsandbytes keep a table on the device from the first 4-bit layer on
    gc.collect()
    before = gpu.allocated(device)
    model = build(weights, device)
    expected = run(model, device)
    on_disk(model, tmp_path, device, **level)
    assert list(tmp_path.iterdir())

    def check(outputs):
        assert torch.equal(outputs, expected)
        assert_left(gpu, device, before)

    check(run(model, device))
    assert_goes_on(lambda: run(model, device), check)
    stop(model)
    assert_left(gpu, device, before)
    assert not list(tmp_path.iterdir()), "files are left"
    assert not any(module._state_dict_hooks for module in model.modules() if not _is_bitsandbytes(module))
    assert torch.equal(run(model.to(device), device), expected)


def _is_bitsandbytes(module):
    return type(module).__module__.startswith("bitsandbytes")


@levels
@pytest.mark.defect(FIX_ID, shows=r"differ|'tensor_\d+'")
def test_a_lora_is_loaded(gpu, tmp_path, level):
    load_lora(gpu, tmp_path, level, 0)


@levels
@pytest.mark.parametrize("bits", [4, 8])
def test_a_lora_is_loaded_into_a_quantized_model(gpu, tmp_path, level, bits):
    load_lora(gpu, tmp_path, level, bits)


def load_lora(gpu, tmp_path, level, bits) -> None:
    pytest.importorskip("peft")
    if sentence := unmet("diffusers>=0.35"):
        pytest.skip(f"before, a LoRA cannot be loaded under group offload; {sentence}")
    device = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path / "flux")

    def pipeline():
        return models.flux_pipeline(flux(folder, bits, device))

    plain_pipe = pipeline()
    without = output(plain_pipe.transformer, device)
    plain_pipe.load_lora_weights(flux_lora(), adapter_name="one")
    expected = output(plain_pipe.transformer, device)
    pipe = pipeline()
    on_disk(pipe.transformer, tmp_path / "groups", device, **level)
    assert torch.equal(output(pipe.transformer, device), without)
    pipe.load_lora_weights(flux_lora(), adapter_name="one")
    for _ in range(2):
        assert torch.equal(output(pipe.transformer, device), expected), "the outputs differ"
    pipe.unload_lora_weights()
    assert torch.equal(output(pipe.transformer, device), without), "the outputs differ"


@functools.cache
def flux_lora():
    """A LoRA of rank 4 for the attention projections of ``models.flux_transformer``."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, module in models.flux_transformer().named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("to_q", "to_k", "to_v")):
            weights[f"transformer.{name}.lora_A.weight"] = torch.randn(4, 64, generator=generator) * 0.1
            weights[f"transformer.{name}.lora_B.weight"] = torch.randn(64, 4, generator=generator) * 0.1
    return weights


@named_by_group
def test_a_file_of_other_tensors_is_refused_before_anything_is_offloaded(gpu, tmp_path):
    on_disk(plain(), tmp_path, gpu.devices[0], **BLOCK)
    other = net(lambda seed: torch.nn.Linear(64, 64, bias=False) if seed < 2 else torch.nn.Linear(64, 64))
    weight = other.blocks[0][0].weight
    expected = weight.clone()
    with pytest.raises(ValueError, match="holds other tensors than the group"):
        offload(other, gpu.devices[0], BLOCK | {"offload_to_disk_path": str(tmp_path)})
    assert torch.equal(weight, expected)


@named_by_group
def test_files_that_were_there_are_used_and_kept(gpu, tmp_path):
    """As upstream does: a second process finds the files of the first."""
    device = gpu.devices[0]
    on_disk(plain(), tmp_path, device, **LEAF)
    files = sorted(tmp_path.iterdir())
    model = on_disk(plain(), tmp_path, device, **LEAF)
    assert torch.equal(model(torch.ones(2, 64, device=device)).cpu(), plain()(torch.ones(2, 64)))
    stop(model)
    assert sorted(tmp_path.iterdir()) == files
