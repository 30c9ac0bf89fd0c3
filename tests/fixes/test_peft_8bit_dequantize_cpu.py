"""peft-8bit-dequantize-cpu: an 8-bit weight on the CPU is dequantized on the GPU with scales that are on the CPU."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, four_bit
from tests.fixes import lora_models as lora
from tests.fixes.callers import assert_goes_on, spelled
from tests.gate import unmet
from tests.rig import models

FIX_ID = "peft-8bit-dequantize-cpu"
pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "Expected all tensors to be on the same device"
ON_A_CPU = "bitsandbytes>=0.46"


def packed():
    """An 8-bit weight and its scales, as a checkpoint that was loaded onto the CPU has them."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(-127, 128, (16, 16), generator=generator, dtype=torch.int8)
    weight = bnb.nn.Int8Params(data, requires_grad=False)
    weight.CB, weight.SCB = weight.data, torch.rand(16, generator=generator) + 0.5
    return weight


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="peft>=0.14")
def test_scales_in_the_state(by_name):
    """They stay there, on the CPU, and the weight stays too."""
    import torch
    from bitsandbytes import MatmulLtState
    from peft.utils.integrations import dequantize_bnb_weight

    weight, state = packed(), MatmulLtState()
    scales = state.SCB = weight.SCB
    expected = weight.data.float() * scales.view(-1, 1) / 127
    found = dequantize_bnb_weight(weight, state=state) if by_name else dequantize_bnb_weight(weight, state)
    assert found.device.type == "cpu"
    assert torch.allclose(found.float(), expected)
    assert state.SCB is scales and weight.SCB is scales
    assert weight.data.device.type == weight.CB.device.type == scales.device.type == "cpu"


@pytest.mark.skipif(bool(unmet("peft>=0.14")), reason="peft before 0.14 dequantizes in another way")
def test_scales_in_the_weight_alone(gpu):
    """As a DoRA asks, before a run. Nothing is left on the GPU."""
    import torch
    from bitsandbytes import MatmulLtState
    from peft.utils.integrations import dequantize_bnb_weight

    weight, state = packed(), MatmulLtState()
    before = [gpu.allocated(device) for device in gpu.devices]  # old bitsandbytes keep tables on a device
    found = dequantize_bnb_weight(weight, state=state)
    assert torch.allclose(found.float(), weight.data.float() * weight.SCB.view(-1, 1) / 127)
    assert state.SCB is None or state.SCB.device.type == "cpu"
    assert [gpu.allocated(device) for device in gpu.devices] == before


def adapted():
    """Two 8-bit layers on the CPU with a LoRA that is large enough to matter."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = eight_bit.stack("cpu").requires_grad_(False)
    model.is_loaded_in_8bit = True
    peft = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=["0", "2"]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return peft.eval()


@pytest.mark.skipif(bool(unmet(ON_A_CPU)), reason="bitsandbytes quantizes on a CPU from 0.46 on")
@pytest.mark.parametrize("runs", [0, 1])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=["peft>=0.14", ON_A_CPU])
def test_a_model_on_the_cpu(gpu, runs):
    """Merged there and taken out again, before and after a run."""
    import torch

    names = adapted().state_dict().keys()
    expected = eight_bit.run(adapted(), "cpu")
    model = adapted()
    for _ in range(runs):
        eight_bit.run(model, "cpu")
    model.merge_adapter()
    assert 0 < lora.distance(eight_bit.run(model, "cpu"), expected) < 0.5
    model.unmerge_adapter()
    assert lora.distance(eight_bit.run(model, "cpu"), expected) < 0.5
    assert model.state_dict().keys() == names
    layers = [part.get_base_layer() for part in model.modules() if hasattr(part, "lora_A")]
    eight_bit.assert_whole(torch.nn.ModuleList(layers), "cpu")
    assert not sum(gpu.allocated(device) for device in gpu.devices)


@pytest.mark.parametrize("runs", [0, 1])
def test_a_pipeline_under_model_offload(gpu, tmp_path, runs):
    """``fuse_lora`` and ``unfuse_lora``, twice; then an interrupted run."""
    import torch
    from diffusers import FluxTransformer2DModel

    if unmet(ON_A_CPU):
        pytest.skip("bitsandbytes quantizes on a CPU from 0.46 on")
    lora.skip_where_flux_takes_no_lora(8)
    models.saved(models.flux_transformer(), tmp_path)
    device = torch.device(gpu.devices[0])

    def pipeline():
        pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, bits=8))
        return lora.load(pipe)

    def output(pipe):
        return lora.run(pipe, device, torch.float16)

    stays, pipe = pipeline().to(device), pipeline()
    pipe.enable_model_cpu_offload(device=spelled(device))
    with_lora = output(stays)
    for _ in range(runs):
        assert torch.equal(output(pipe), with_lora)
    for _ in range(2):
        pipe.fuse_lora(components=["transformer"])
        stays.fuse_lora(components=["transformer"])
        fused = output(pipe)
        assert lora.distance(fused, with_lora) > 0
        assert torch.equal(fused, output(stays))
        pipe.unfuse_lora(components=["transformer"])
        stays.unfuse_lora(components=["transformer"])
        assert torch.equal(output(pipe), output(stays))

    def check(latents):
        assert torch.equal(latents, output(stays))

    assert_goes_on(lambda: output(pipe), check, (0.5,))
