"""diffusers-group-offload-nested-lists: block-level group offloading leaves lists of blocks on the CPU."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, LOW, STREAM, offload
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

FIX_ID = "diffusers-group-offload-nested-lists"
SHOWS = "Expected all tensors to be on the same device|should be the same"
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")
MODES = {"": BLOCK, "stream": BLOCK | STREAM, "low": BLOCK | LOW, "two": BLOCK | {"num_blocks_per_group": 2}}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Level(torch.nn.Module):
    """What VAEs of diffusers write as ``torch.nn.Module()`` with attributes."""

    def __init__(self, scale=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.down = torch.nn.Linear(8, 8)
        if scale:
            self.scale = torch.nn.Parameter(torch.full((8,), 2.0))


class Net(torch.nn.Module):
    """Levels that are never called; from the last to the first if ``backwards``, as a decoder has them."""

    def __init__(self, kind, backwards=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        if kind == "lists":
            self.levels = torch.nn.ModuleList(
                [torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)]) for _ in range(3)]
            )
        else:
            self.levels = torch.nn.ModuleList([Level(scale=kind == "scaled") for _ in range(3)])
        self.plain = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.backwards = backwards
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for level in reversed(self.levels) if self.backwards else self.levels:
            for block in level if isinstance(level, torch.nn.ModuleList) else level.blocks:
                x = x + block(x)
            if isinstance(level, Level):
                x = level.down(x) * getattr(level, "scale", 1)
        for block in self.plain:
            x = block(x)
        return x


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("kind", ["lists", "levels", "scaled"])
def test_levels_that_are_not_called(gpu, kind):
    check(gpu, kind, BLOCK)


@modes
@pytest.mark.parametrize("kind", ["lists", "levels", "scaled"])
@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
def test_every_way(gpu, kind, mode, backwards):
    check(gpu, kind, mode, backwards)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("kind", ["lists", "levels", "scaled"])
def test_with_the_hooks_of_accelerate(gpu, kind):
    """Every module of an 8-bit model has one where it was loaded; also a list, which is not called for that."""
    check(gpu, kind, BLOCK, hooked=True)


def check(gpu, kind, mode, backwards=False, hooked=False):
    from accelerate.hooks import ModelHook, add_hook_to_module

    device = gpu.devices[0]
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    expected = Net(kind, backwards).to(device)(x)
    before = gpu.allocated(device)
    net = Net(kind, backwards)
    for module in net.modules() if hooked else ():
        add_hook_to_module(module, ModelHook())
    names = list(net.state_dict())
    offload(net, device, mode)

    def assert_right(output):
        assert torch.equal(output, expected)
        assert gpu.allocated(device) <= before + expected.nbytes, "weights stayed on the device"

    for _ in range(3):
        assert_right(net(x))
    assert_goes_on(lambda: net(x), assert_right, (0.5,))
    assert list(net.state_dict()) == names
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}


def test_each_block_is_brought_alone(gpu):
    net = Net("levels")
    offload(net, gpu.devices[0], BLOCK)
    assert [name for name, layer in net.named_modules() if name and hasattr(layer, "_diffusers_hook")] == [
        *(
            f"levels.{level}.{part}"
            for level in range(3)
            for part in ("blocks.0", "blocks.1", "down")
        ),
        "plain.0",
        "plain.1",
    ]  # fmt: skip


def test_a_model_without_such_levels_is_as_before(gpu):
    net = torch.nn.Module()
    net.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])
    offload(net, gpu.devices[0], BLOCK | {"num_blocks_per_group": 2})
    name = "group_offloading"
    groups = [block._diffusers_hook.get_hook(name).group for block in net.blocks]
    assert groups[0] is groups[1] is not groups[2]
    assert groups[2] is groups[3]


@pytest.mark.skipif(bool(unmet("diffusers>=0.36")), reason="``block_modules`` came later")
@pytest.mark.parametrize("mode", [BLOCK, BLOCK | STREAM, MODES["two"]], ids=["", "stream", "two"])
def test_lists_that_the_caller_names(gpu, mode):
    """diffusers finds the blocks by itself where ``block_modules`` has the name of the outer list."""
    device = gpu.devices[0]
    x = torch.randn(2, 8).to(device)
    expected = Net("lists").to(device)(x)
    net = Net("lists")
    offload(net, device, mode | {"block_modules": ["levels"]})
    for _ in range(2):
        assert torch.equal(net(x), expected)
    assert all(hasattr(block, "_diffusers_hook") for level in net.levels for block in level)


def test_an_item_that_is_none(gpu):
    """As Wuerstchen has them, beside its blocks and alone."""
    net = Net("lists")
    net.levels[0][0] = net.plain[0] = torch.nn.Identity()
    device = gpu.devices[0]
    x = torch.randn(2, 8).to(device)
    expected = net.to(device)(x)
    net.none = torch.nn.ModuleList([None, torch.nn.Linear(8, 8), None])
    net.levels[0].append(None)
    offload(net.to("cpu"), device, BLOCK)
    net.levels[0].pop(-1)
    for _ in range(2):
        assert torch.equal(net(x), expected)
    assert hasattr(net.none[1], "_diffusers_hook")


def test_a_block_that_stands_in_two_lists(gpu):
    net = Net("lists")
    net.levels[1][0] = net.levels[0][0]
    device = gpu.devices[0]
    x = torch.randn(2, 8).to(device)
    expected = net.to(device)(x)
    offload(net.to("cpu"), device, BLOCK)
    for _ in range(2):
        assert torch.equal(net(x), expected)


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="applied again from diffusers 0.35 on")
def test_applied_again(gpu):
    """As diffusers does with every model of a pipeline after a LoRA was loaded."""
    from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading as again

    device = gpu.devices[0]
    x = torch.randn(2, 8).to(device)
    expected = Net("levels").to(device)(x)
    net = Net("levels")
    offload(net, device, BLOCK)
    for _ in range(2):
        again(net)
        assert torch.equal(net(x), expected)


@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="offloads to the disk from diffusers 0.35 on")
def test_on_disk(gpu, tmp_path):
    device = gpu.devices[0]
    x = torch.randn(2, 8).to(device)
    expected = Net("scaled").to(device)(x)
    net = Net("scaled")
    offload(net, device, BLOCK | {"offload_to_disk_path": str(tmp_path)})
    for _ in range(2):
        assert torch.equal(net(x), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_stable_cascade(gpu, stream):
    from diffusers.models import StableCascadeUNet

    def made():
        torch.manual_seed(0)
        return StableCascadeUNet(
            in_channels=4, out_channels=4, conditioning_dim=32, block_out_channels=(32, 32),
            num_attention_heads=(2, 2), down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1),
            clip_text_pooled_in_channels=32,
        ).eval()  # fmt: skip

    def run(unet):
        generator = torch.Generator().manual_seed(1)
        sample, pooled = (
            torch.randn(size, generator=generator).to(device) for size in ((1, 4, 8, 8), (1, 1, 32))
        )
        with torch.no_grad():
            return unet(
                sample, timestep_ratio=torch.ones(1, device=device), clip_text_pooled=pooled
            ).sample.cpu()

    device = gpu.devices[0]
    expected = run(made().to(device))
    unet = made()
    offload(unet, device, BLOCK | (STREAM if stream else {}))
    for _ in range(2):
        assert torch.equal(run(unet), expected)


@pytest.mark.long
@pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="this VAE came with diffusers 0.42")
@pytest.mark.parametrize("name", ["AutoencoderKLKVAE", "AutoencoderVidTok"])
def test_a_vae(gpu, name):
    """With ``diffusers-group-offload-vae-blocks``, which brings its encoder and its decoder."""
    import diffusers

    from tests.pipelines import components

    def made():
        torch.manual_seed(0)
        return components.diffusers_model(getattr(diffusers, name), {}).float().eval()

    def run(vae):
        shape = (1, 3, 32, 32) if name == "AutoencoderKLKVAE" else (1, 3, 5, 32, 32)
        with torch.no_grad():
            encoded = vae.encode(torch.ones(shape, device=device))
            latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
            return vae.decode(latents)[0].cpu()

    device = gpu.devices[0]
    expected = run(made().to(device))
    vae = made()
    offload(vae, device, BLOCK)
    for _ in range(2):
        assert torch.equal(run(vae), expected)
