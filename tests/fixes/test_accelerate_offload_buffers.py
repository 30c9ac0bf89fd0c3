"""accelerate-offload-buffers: sequential offload leaves the buffers of quantized layers on the GPU."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.rig import models

torch = pytest.importorskip("torch")

FIX_ID = "accelerate-offload-buffers"
STAYED = r"\d+ bytes stayed on cuda"


class Packed(torch.nn.Module):
    """A linear layer whose weight is a buffer, as in the layouts of GPTQ and AutoRound."""

    def __init__(self, features: int = 64):
        super().__init__()
        self.in_features = self.out_features = features
        self.register_buffer("qweight", torch.randint(-128, 128, (features, features), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(features, 1) / 128)
        self.register_buffer("bias", torch.zeros(features))
        self.register_buffer("range", torch.arange(4), persistent=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.qweight * self.scales, self.bias) + self.range.sum()


class Norm(torch.nn.Module):
    """Not a linear layer: pipelines may read its buffers directly."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(64))

    def forward(self, x):
        return x - self.mean


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), Packed(), Norm(), Packed()).eval()


def run(model, device="cpu"):
    with torch.no_grad():
        return model(torch.ones(2, 64, device=device)).cpu()


def allowed() -> int:
    """What may stay: the buffer of ``Norm``, and those that are not persistent."""
    return 64 * 4 + 2 * 4 * 8


def assert_left(gpu, device, before) -> None:
    left = gpu.allocated(device) - before
    assert left <= allowed(), f"{left} bytes stayed on {device}"


def offload(model, device):
    from accelerate import cpu_offload

    return cpu_offload(model, spelled(device))


@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_nothing_is_left(gpu):
    device = gpu.devices[-1]
    expected = run(build().to(device), device)
    before = gpu.allocated(device)
    model = offload(build(), device)
    assert_left(gpu, device, before)

    def check(output):
        assert torch.equal(output, expected)
        assert_left(gpu, device, before)

    for _ in range(2):
        check(run(model, device))
    assert_goes_on(lambda: run(model, device), check)


@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_a_checkpoint_in_the_layout_of_bfl(gpu, tmp_path):
    """Its scales are buffers."""
    diffusers = pytest.importorskip("diffusers")
    if not hasattr(diffusers, "BFLQuantizationConfig"):
        pytest.skip("this diffusers does not read checkpoints in the layout of BFL")
    device = gpu.devices[0]
    expected = models.call_flux(models.flux_pipeline(bfl(tmp_path).to(device)), device, torch.float32).cpu()
    before = gpu.allocated(device)
    pipe = models.flux_pipeline(bfl(tmp_path))
    pipe.enable_sequential_cpu_offload(device=spelled(device))
    left = gpu.allocated(device) - before
    assert left <= 0, f"{left} bytes stayed on {device}"
    for _ in range(2):
        assert torch.equal(models.call_flux(pipe, device, torch.float32).cpu(), expected)
    pipe.remove_all_hooks()
    pipe.to(device)
    assert torch.equal(models.call_flux(pipe, device, torch.float32).cpu(), expected)


def bfl(folder):
    """A Flux transformer with float8 weights and a scale for each row, read as its users read it."""
    import diffusers
    from diffusers.loaders import single_file_model
    from safetensors.torch import save_file

    model = models.flux_transformer()
    model.save_config(folder)
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = tensor
        if tensor.ndim == 2 and "blocks" in name and name.endswith("weight"):
            scale = tensor.abs().amax(1) / 448
            state[name] = (tensor / scale[:, None]).to(torch.float8_e4m3fn)
            state[f"{name}_scale"] = scale
    save_file(state, folder / "model.safetensors")
    # Upstream takes the file for one with the names of the original authors.
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    with mock.patch.dict(entry, checkpoint_mapping_fn=lambda checkpoint, **_: checkpoint):
        return diffusers.FluxTransformer2DModel.from_single_file(
            str(folder / "model.safetensors"),
            config=str(folder),
            quantization_config=diffusers.BFLQuantizationConfig(compute_dtype=torch.float32),
            torch_dtype=torch.float32,
        ).eval()


def test_the_state_dict_and_what_comes_after_the_hooks():
    from accelerate.hooks import remove_hook_from_submodules

    model, saved = build(), build().state_dict()
    expected = run(model)
    offload(model, "cpu")
    assert model[1].qweight.is_meta and not model[2].mean.is_meta
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    remove_hook_from_submodules(model)
    assert torch.equal(run(model), expected)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_disk_offload(gpu, tmp_path):
    from accelerate import disk_offload

    device = gpu.devices[0]
    expected = run(build().to(device), device)
    before = gpu.allocated(device)
    model = disk_offload(build(), str(tmp_path), spelled(device))
    for _ in range(2):
        assert torch.equal(run(model, device), expected)
        assert_left(gpu, device, before)


def test_a_map_without_the_buffers_and_scalars():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layer = Packed()
    hook = AlignDevicesHook(
        execution_device="cpu", offload=True, weights_map={"qweight": layer.qweight.clone()}
    )
    add_hook_to_module(layer, hook)
    assert not hook.offload_buffers and not layer.scales.is_meta
    scalar = torch.nn.Linear(4, 4)
    scalar.register_buffer("input_scale", torch.ones(()))
    add_hook_to_module(scalar, AlignDevicesHook(execution_device="cpu", offload=True))
    assert scalar.weight.is_meta and not scalar.input_scale.is_meta
