"""diffusers-ip-adapter-placement: where the layers of an IP-Adapter are, once it is loaded."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import ip_adapter
from tests.fixes import torchao_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.fixes.group_offloaded import MODES, assert_left, modes, offload
from tests.gate import unmet
from tests.marks import rest_is_long
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
accelerate = pytest.importorskip("accelerate")

SHOWS = "same device|bytes stayed|Tensor on device meta is not on the expected device"
TARGETS = {
    "unet": ("diffusers-ip-adapter-unet", "diffusers>=0.33"),
    "flux": ("diffusers-ip-adapter-flux", "diffusers>=0.32"),
    "sd3": ("diffusers-ip-adapter-sd3", "diffusers>=0.32"),
}


def each_model(shows=None, names=tuple(TARGETS)):
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    *([pytest.mark.defect(target, shows=shows)] if shows else ()),
                    pytest.mark.skipif(bool(unmet(release)), reason=f"it has that from {release} on"),
                ],
            )
            for name, (target, release) in TARGETS.items()
            if name in names
        ],
    )


def adapted(name, device):
    """The model, which was never offloaded, and its outputs without and with the adapter."""
    model, adapter = getattr(ip_adapter, name)()
    model.to(device)
    without = ip_adapter.run(model, device)
    model._load_ip_adapter_weights(adapter)
    found = without, ip_adapter.run(model, device)
    assert not torch.equal(*found)
    return found


def unload(model):
    """As ``unload_ip_adapter`` of a pipeline does."""
    from diffusers.models import attention_processor

    if hasattr(model, "image_proj"):
        model.image_proj = None
    else:
        model.encoder_hid_proj = model.config.encoder_hid_dim_type = None
    if "Flux" not in type(model).__name__:
        name = "JointAttnProcessor2_0" if hasattr(model, "image_proj") else "AttnProcessor2_0"
        plain = getattr(attention_processor, name)
    else:
        from diffusers.models.transformers import transformer_flux

        # in the other place before 0.35
        plain = (
            getattr(transformer_flux, "FluxAttnProcessor", None) or attention_processor.FluxAttnProcessor2_0
        )
    model.set_attn_processor({key: plain() for key in model.attn_processors})


@each_model(SHOWS)
@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("low_cpu_mem_usage", rest_is_long([True, False], True))
@modes()
def test_into_groups(gpu, side, name, mode, low_cpu_mem_usage):
    """It computes what it does without offload, and no byte of it stays on the device."""
    pytest.importorskip(
        "diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0"
    )
    if side == "bare" and low_cpu_mem_usage and unmet("diffusers>=0.35"):
        pytest.skip("it stays on the device and computes there, as with us before 0.35")
    device = gpu.devices[0]
    without, expected = adapted(name, device)
    before = gpu.allocated(device)
    model, adapter = getattr(ip_adapter, name)()
    offload(model, device, mode)
    assert torch.equal(ip_adapter.run(model, device), without)
    model._load_ip_adapter_weights(adapter, low_cpu_mem_usage=low_cpu_mem_usage)

    def check(output):
        assert torch.equal(output, expected)
        if not unmet("diffusers>=0.35"):
            assert_left(gpu, device, before)

    for _ in range(2):
        check(ip_adapter.run(model, device))
    assert_goes_on(lambda: ip_adapter.run(model, device), check)
    unload(model)
    for _ in range(2):
        assert torch.equal(ip_adapter.run(model, device), without)
        assert_left(gpu, device, before)


@each_model(SHOWS, ("flux", "sd3"))
@pytest.mark.parametrize("way", ["moved", "sequential"])
def test_whole_into_a_transformer(gpu, side, name, way):
    if side == "bare" and way == "moved" and unmet("diffusers>=0.33"):
        pytest.skip("before 0.33 it is moved to the device of the transformer")
    device = gpu.devices[0]
    without, expected = adapted(name, device)
    model, adapter = getattr(ip_adapter, name)()
    if way == "moved":
        model.to(device)
    else:
        accelerate.cpu_offload(model, spelled(device))
    assert torch.equal(ip_adapter.run(model, device), without)
    model._load_ip_adapter_weights(adapter, low_cpu_mem_usage=False)

    def check(output):
        assert torch.equal(output, expected)

    for _ in range(2):
        check(ip_adapter.run(model, device))
    assert_goes_on(lambda: ip_adapter.run(model, device), check)


@each_model()
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False], ids=["low", "whole"])
@pytest.mark.parametrize("first", ["run", "load"])
def test_into_a_model_that_moves_as_a_whole(gpu, name, first, low_cpu_mem_usage):
    device = gpu.devices[0]
    without, expected = adapted(name, device)
    before = gpu.allocated(device)
    model, adapter = getattr(ip_adapter, name)()
    _, hook = accelerate.cpu_offload_with_hook(model, spelled(device))
    if first == "run":
        assert torch.equal(ip_adapter.run(model, device), without)
    model._load_ip_adapter_weights(adapter, low_cpu_mem_usage=low_cpu_mem_usage)
    for _ in range(2):
        assert torch.equal(ip_adapter.run(model, device), expected)
        hook.offload()
        assert_left(gpu, device, before)


@each_model()
@pytest.mark.parametrize("way", ["moved", "leaf", "leaf-stream", "block"])
def test_into_a_model_of_another_dtype(gpu, name, way):
    device = gpu.devices[0]
    model, adapter = getattr(ip_adapter, name)()
    model.to(torch.bfloat16)
    if way == "moved":
        model.to(device)
    else:
        pytest.importorskip(
            "diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0"
        )
        offload(model, device, MODES[way])
    known = {id(parameter) for parameter in model.parameters()}
    model._load_ip_adapter_weights(adapter)
    new = [parameter for parameter in model.parameters() if id(parameter) not in known]
    assert {parameter.dtype for parameter in new} == {torch.bfloat16}
    assert torch.isfinite(ip_adapter.run(model, device)).all()


@pytest.mark.skipif(bool(unmet(TARGETS["flux"][1])), reason="no IP-Adapter for Flux before")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            "moved", marks=pytest.mark.defect("diffusers-ip-adapter-flux", shows="Casting a quantized model")
        ),
        "sequential",
    ],
)
def test_into_a_quantized_transformer(gpu, side, tmp_path, way):
    from diffusers import FluxTransformer2DModel

    if side == "bare" and not unmet("diffusers>=0.33"):
        pytest.skip("from 0.33 on it casts nothing")
    device = gpu.devices[0]
    made, adapter = ip_adapter.flux()
    folder = models.saved(made, tmp_path)

    def load():
        return models.load_quantized(FluxTransformer2DModel, folder)

    model = load()
    without = ip_adapter.run(model, device, torch.float16)
    model._load_ip_adapter_weights(adapter)
    expected = ip_adapter.run(model, device, torch.float16)
    assert torch.isfinite(expected).all()
    assert not torch.equal(without, expected)
    if way == "sequential":
        model = load()
        accelerate.cpu_offload(model, spelled(device))
        model._load_ip_adapter_weights(adapter)
        for _ in range(2):
            assert torch.equal(ip_adapter.run(model, device, torch.float16), expected)


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="before 0.35 the groups stay as they are")
@pytest.mark.parametrize("way", ["leaf", "block-stream"])
def test_into_a_quantized_unet_in_groups(gpu, tmp_path, way):
    from diffusers import UNet2DConditionModel

    device = gpu.devices[0]
    folder = models.saved(models.unet(), tmp_path)

    def quantized():
        return models.load_quantized(UNet2DConditionModel, folder)

    expected = quantized()
    expected._load_ip_adapter_weights([ip_adapter.of_unet(expected)])
    expected = ip_adapter.run(expected, device, torch.float16)
    before = gpu.allocated(device)
    model = quantized()
    offload(model, device, MODES[way])
    model._load_ip_adapter_weights([ip_adapter.of_unet(model)])

    def check(output):
        assert torch.equal(output, expected)
        assert_left(gpu, device, before)

    for _ in range(2):
        check(ip_adapter.run(model, device, torch.float16))
    assert_goes_on(lambda: ip_adapter.run(model, device, torch.float16), check)


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="before 0.35 the groups stay as they are")
def test_interrupted_where_the_groups_are_set_up_once_more(gpu, monkeypatch):
    """They are taken off at that moment."""
    from diffusers.hooks import group_offloading

    device = gpu.devices[0]
    _, expected = adapted("flux", device)
    before = gpu.allocated(device)
    model, adapter = ip_adapter.flux()
    offload(model, device, MODES["leaf"])
    original, calls = group_offloading._apply_group_offloading, []

    def interrupted_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(group_offloading, "_apply_group_offloading", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        model._load_ip_adapter_weights(adapter)
    model._load_ip_adapter_weights(adapter)
    for _ in range(2):
        assert torch.equal(ip_adapter.run(model, device), expected)
        assert_left(gpu, device, before)


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="torchao's weights load differently before 0.35")
def test_into_a_torchao_transformer_that_is_spread(gpu, tmp_path):
    """Its weights cannot be compared."""
    from diffusers import FluxTransformer2DModel, TorchAoConfig

    config = torchao_models.config("int8")

    device = gpu.devices[0]
    made, adapter = ip_adapter.flux()
    folder = models.saved(made, tmp_path)
    outputs = []
    for spread in (False, True):
        model = FluxTransformer2DModel.from_pretrained(
            folder,
            quantization_config=TorchAoConfig(config),
            torch_dtype=torch.bfloat16,
        )
        if spread:
            names = [name for name, _ in model.named_children()]
            places = {name: (spelled(device) if index < 3 else "cpu") for index, name in enumerate(names)}
            accelerate.dispatch_model(model, places, main_device=spelled(device))
        else:
            model.to(device)
        model._load_ip_adapter_weights(adapter)
        outputs += [ip_adapter.run(model, device, torch.bfloat16) for _ in range(2)]
    assert torch.isfinite(outputs[0]).all()
    assert all(torch.equal(output, outputs[0]) for output in outputs)
