"""diffusers-motion-linear-input: AnimateDiff passes the input of its linear layers by keyword."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.packed_layers import eight_bit_linear, gguf_linear
from tests.rig import models

FIX_ID = "diffusers-motion-linear-input"
SHOWS = r"Linear\w*\.forward\(\) (got an unexpected keyword argument 'input'|missing 1 required positional)"


def block():
    """The block of a motion module, with plain layers of the size that the quantized ones of the helpers have."""
    import torch
    from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D

    torch.manual_seed(0)
    features = four_bit.FEATURES
    return AnimateDiffTransformer3D(2, features // 2, in_channels=features, norm_num_groups=8).eval()


def lora_linear(device):
    import torch

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES))
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["0"])
    return peft.inject_adapter_in_model(config, layers)[0].to(device)


def by_name(layer):
    """The layer behind a module that names its argument as ``torch.nn.Linear`` does."""
    import torch

    class Named(torch.nn.Module):
        def forward(self, input):
            return layer(input)

    return Named()


@pytest.mark.parametrize(
    "linear",
    [four_bit.linear, eight_bit_linear, gguf_linear, lora_linear],
    ids=["4-bit", "8-bit", "gguf", "lora"],
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_layer_that_is_not_plain(gpu, linear):
    import torch

    device = gpu.devices[0]
    motion, layer = block().to(device), linear(device)
    given = torch.linspace(-1, 1, 2 * four_bit.FEATURES * 4).view(2, four_bit.FEATURES, 2, 2).to(device)
    if layer.weight.dtype == torch.int8:
        motion, given = motion.half(), given.half()
    with torch.no_grad():
        motion.proj_in, motion.proj_out = by_name(layer), by_name(layer)
        expected = motion(given, num_frames=2)
        motion.proj_in, motion.proj_out = layer, layer
        assert torch.equal(motion(given, num_frames=2), expected)
    assert not layer._forward_pre_hooks, "nothing stays that would be saved with the model"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_unet_from_a_checkpoint(gpu, tmp_path, bits):
    import torch
    from diffusers import UNetMotionModel

    torch.manual_seed(0)
    unet = UNetMotionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlockMotion",),
        up_block_types=("CrossAttnUpBlockMotion",),
        block_out_channels=(32,),
        layers_per_block=1,
        cross_attention_dim=32,
        num_attention_heads=2,
        norm_num_groups=8,
        motion_num_attention_heads=2,
        motion_max_seq_length=4,
    )
    models.saved(unet, tmp_path)
    device = gpu.devices[0]
    unet = four_bit.load(UNetMotionModel, tmp_path, bits=bits, dtype=torch.float32)
    if bits == 4:
        unet.to(device)
    inputs = (torch.ones(1, 4, 2, 8, 8), torch.tensor([1]), torch.ones(2, 3, 32))
    with torch.no_grad():
        out, again = (unet(*(given.to(device) for given in inputs)).sample for _ in range(2))
    assert out.shape == (1, 4, 2, 8, 8) and out.isfinite().all()
    assert torch.equal(out, again)


def test_an_error_in_the_block_leaves_no_hook(gpu):
    import torch

    layer = four_bit.linear(gpu.devices[0])
    motion = block().to(gpu.devices[0])
    motion.proj_in = layer
    motion.transformer_blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    with pytest.raises(TypeError):
        motion(torch.zeros(1, four_bit.FEATURES, 2, 2, device=gpu.devices[0]))
    assert not layer._forward_pre_hooks
    layer(four_bit.batch(gpu.devices[0]))
