"""diffusers-group-offload-disk: a model that is group-offloaded to disk is saved as uninitialised memory."""

from __future__ import annotations

import functools
import gc
import os

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
    offload(model, device, mode | {"offload_to_disk_path": str(folder)})
    if os.environ.get("DIFFUSERS_QUANTFIX") == "off":
        # What upstream leaves in memory, uninitialised, may happen to be what was there before.
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


@levels
@pytest.mark.defect(FIX_ID, shows=r"differ|'tensor_\d+'")
def test_a_lora_is_fused(gpu, tmp_path, level):
    fuse_lora(gpu, tmp_path, level, 0)


@levels
@pytest.mark.parametrize("bits", [4, 8])
def test_a_lora_is_fused_into_a_quantized_model(gpu, tmp_path, level, bits):
    fuse_lora(gpu, tmp_path, level, bits)


def fuse_lora(gpu, tmp_path, level, bits) -> None:
    pytest.importorskip("peft")
    if sentence := unmet("diffusers>=0.35"):
        pytest.skip(f"before, a LoRA cannot be loaded under group offload; {sentence}")
    device = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path / "flux")
    plain_pipe = models.flux_pipeline(flux(folder, bits, device))
    pipe = models.flux_pipeline(flux(folder, bits, device))
    on_disk(pipe.transformer, tmp_path / "groups", device, **level)
    for each in (plain_pipe, pipe):
        each.load_lora_weights(flux_lora(), adapter_name="one")
        output(each.transformer, device)
        each.fuse_lora(lora_scale=3.0)
    fused = output(plain_pipe.transformer.to(device), device)
    for _ in range(2):
        torch.testing.assert_close(output(pipe.transformer, device), fused, msg="the outputs differ")
    for each in (plain_pipe, pipe):
        each.unfuse_lora()
    unfused = output(plain_pipe.transformer.to(device), device)
    assert not torch.equal(fused, unfused)
    for _ in range(2):
        torch.testing.assert_close(output(pipe.transformer, device), unfused, msg="the outputs differ")


@levels
@pytest.mark.defect(FIX_ID, shows=r"differ|'tensor_\d+'")
def test_a_lora_is_swapped(gpu, tmp_path, level):
    swap_lora(gpu, tmp_path, level, 0)


@levels
@pytest.mark.parametrize("bits", [4, 8])
def test_the_lora_of_a_quantized_model_is_swapped(gpu, tmp_path, level, bits):
    swap_lora(gpu, tmp_path, level, bits)


def swap_lora(gpu, tmp_path, level, bits) -> None:
    pytest.importorskip("peft")
    if sentence := unmet("diffusers>=0.35"):
        pytest.skip(f"before, a LoRA cannot be loaded under group offload; {sentence}")
    if sentence := unmet("peft>=0.20"):
        pytest.skip(f"before, peft may put plain tensors in the place of parameters; {sentence}")
    device = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path / "flux")
    other = {name: -2 * tensor if "lora_B" in name else tensor for name, tensor in flux_lora().items()}
    plain_pipe = models.flux_pipeline(flux(folder, bits, device))
    pipe = models.flux_pipeline(flux(folder, bits, device))
    on_disk(pipe.transformer, tmp_path / "groups", device, **level)
    for each in (plain_pipe, pipe):
        each.load_lora_weights(dict(flux_lora()), adapter_name="one")
    first = output(plain_pipe.transformer, device)
    assert torch.equal(output(pipe.transformer, device), first), "the outputs differ"
    for each in (plain_pipe, pipe):
        each.load_lora_weights(dict(other), adapter_name="one", hotswap=True)
    second = output(plain_pipe.transformer, device)
    assert not torch.equal(first, second)
    for _ in range(2):
        assert torch.equal(output(pipe.transformer, device), second), "the outputs differ"


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
def test_files_that_were_there_are_used_and_kept(gpu, tmp_path):
    """As upstream does: a second process finds the files of the first."""
    device = gpu.devices[0]
    on_disk(plain(), tmp_path, device, **LEAF)
    files = sorted(tmp_path.iterdir())
    model = on_disk(plain(), tmp_path, device, **LEAF)
    assert torch.equal(model(torch.ones(2, 64, device=device)).cpu(), plain()(torch.ones(2, 64)))
    stop(model)
    assert sorted(tmp_path.iterdir()) == files


def scaled(factor):
    """`plain` with other weights."""
    model = plain()
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    return model


def assert_output(model, twin, device) -> None:
    inputs = torch.ones(2, 64, device=device)
    twin.to(device)  # the CPU rounds in another way
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(inputs), twin(inputs)), "the outputs differ"


streams = pytest.mark.parametrize("stream", [{}, STREAM], ids=["", "stream"])


@levels
@streams
@named_by_group
@pytest.mark.defect(FIX_ID, shows=NOISE)
def test_two_models_in_one_folder(gpu, tmp_path, level, stream):
    """Both transformers of Wan 2.2 are of one class."""
    device = gpu.devices[0]
    models = [on_disk(scaled(factor), tmp_path, device, **level, **stream) for factor in (1.0, 1.5, 1.0)]
    for _ in range(2):
        for model, factor in zip(models, (1.0, 1.5, 1.0), strict=True):
            assert_output(model, scaled(factor), device)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert all(path.suffix == ".safetensors" for path in files)
    stop(models[1])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files, "of others"
    stop(models[0])
    for model, factor in zip(models[1:], (1.5, 1.0), strict=True):
        inputs = torch.ones(2, 64, device=device)
        assert torch.equal(model.to(device)(inputs), scaled(factor).to(device)(inputs))


@named_by_group
@pytest.mark.defect(
    FIX_ID, shows=NOISE + "|holds other tensors|Header|header|size mismatch|must match|KeyError|tensor_"
)
@pytest.mark.parametrize("left", ["other weights", "other shapes", "half", "nothing"])
def test_a_file_that_was_left_there(gpu, tmp_path, left):
    """Of another checkpoint, of another model, of a process that was killed."""
    device = gpu.devices[0]
    first = on_disk(scaled(2.0), tmp_path, device, **BLOCK)
    files = sorted(tmp_path.iterdir())
    for path in files:
        if left == "other shapes":
            from safetensors.torch import save_file

            save_file({"tensor_0": torch.ones(7)}, path)
        elif left != "other weights":
            path.write_bytes(path.read_bytes()[: 1000 if left == "half" else 0])
    content = [path.read_bytes() for path in files]
    del first
    model = on_disk(plain(), tmp_path, device, **BLOCK)
    assert_output(model, plain(), device)
    stop(model)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == content


@levels
@streams
@pytest.mark.defect(FIX_ID, shows=NOISE)
def test_weights_that_are_changed_between_two_passes(gpu, tmp_path, level, stream):
    """As `fuse_lora` and the hotswap of a LoRA change them, and ``load_state_dict``."""
    device = gpu.devices[0]
    model, twin = on_disk(plain(), tmp_path, device, **level, **stream), plain()
    assert_output(model, twin, device)
    for changed in (model, twin):
        changed.blocks[0][0].weight.data.add_(0.25)
        changed.blocks[1][2].bias.data.copy_(torch.full((64,), 3.0))
        changed.scale.data.fill_(2.0)
    assert_output(model, twin, device)
    state = scaled(3.0).state_dict()
    for loaded in (model, twin):
        loaded.load_state_dict(state)
    assert_output(model, twin, device)
    assert_same(model.state_dict(), state)


@levels
@streams
def test_a_buffer_that_a_layer_writes_to(gpu, tmp_path, level, stream):
    """Also in training, where the weights stay on the disk all the same."""
    device = gpu.devices[0]

    def moving():
        model = plain().train()
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
        return model

    model, twin = on_disk(moving(), tmp_path, device, **level, **stream), moving()
    inputs = torch.ones(2, 64)
    for _ in range(4):
        torch.testing.assert_close(model(inputs.to(device)).cpu(), twin(inputs))
    norm, other = model.blocks[-1][0], twin.blocks[-1][0]
    torch.testing.assert_close(norm.running_mean, other.running_mean)
    assert norm.num_batches_tracked == other.num_batches_tracked == 4
    if level == BLOCK and not stream:
        assert model.calls == 4
    assert is_in_a_file(model.blocks[0][0].weight)


def is_in_a_file(tensor) -> bool:
    """Whether the memory of ``tensor`` is the mapping of a file, which the system can take back."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "safetensors" in line
    return False


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc")
@levels
@streams
def test_the_weights_are_not_in_memory(gpu, tmp_path, level, stream):
    device = gpu.devices[0]
    model = on_disk(plain(), tmp_path, device, **level, **stream)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            model(torch.ones(2, 64, device=device))
        assert all(is_in_a_file(tensor) for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.defect(FIX_ID, shows=NOISE + "|to be on the same device")
@streams
def test_a_weight_that_two_modules_share(gpu, tmp_path, stream):
    """``shared`` and ``encoder.embed_tokens`` of T5 are one, and at leaf level of two groups."""
    device = gpu.devices[0]

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.shared, self.embed = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.embed.weight = self.shared.weight

        def forward(self, x):
            return self.embed(self.shared(x))

    model, twin = on_disk(Tied(), tmp_path, device, **LEAF, **stream), Tied()
    assert_output(model, twin, device)
    for changed in (model, twin):
        changed.embed.weight.data.mul_(2)
    assert_output(model, twin, device)
    for changed in (model, twin):
        changed.shared.weight.data.mul_(2)
    assert_output(model, twin, device)
    stop(model)
    assert model.embed.weight is model.shared.weight
    assert_same(model.state_dict(), twin.state_dict())


def test_a_file_that_is_changed_under_us(gpu, tmp_path):
    device = gpu.devices[0]
    model = on_disk(plain(), tmp_path, device, **BLOCK)
    for path in tmp_path.iterdir():
        with open(path, "r+b") as file:
            file.truncate(100)
    with pytest.raises(
        RuntimeError, match="was changed by another program while weights were offloaded to it"
    ):
        model(torch.ones(2, 64, device=device))


def test_a_file_that_is_deleted_under_us(gpu, tmp_path):
    device = gpu.devices[0]
    model = on_disk(plain(), tmp_path, device, **BLOCK)
    for path in list(tmp_path.iterdir()):
        path.unlink()
    assert_output(model, plain(), device)
    stop(model)
    assert_same(model.state_dict(), plain().state_dict())


def test_a_file_that_cannot_be_written(gpu, tmp_path):
    """A full disk: nothing is changed, and nothing is left."""
    import resource
    import signal

    device = gpu.devices[0]
    model = plain()
    weight = model.blocks[0][0].weight
    expected = weight.clone()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(Exception, match=r"File too large|os error 27"):
            offload(model, device, BLOCK | {"offload_to_disk_path": str(tmp_path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(weight, expected)
    assert not list(tmp_path.iterdir())
