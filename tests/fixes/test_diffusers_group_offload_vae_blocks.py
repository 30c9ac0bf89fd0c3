"""diffusers-group-offload-vae-blocks: a VAE cannot run under block-level group offloading."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

FIX_ID = "diffusers-group-offload-vae-blocks"
SHOWS = "Expected all tensors to be on the same device|should be the same"
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.36")), reason="no class can name its parts before diffusers 0.36"
)

_VIDEO = {
    "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False],
    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip
# Class -> config, shape of its latents, shape of its pictures.
VAES = {
    "AutoencoderKLQwenImage": (_VIDEO, (1, 4, 1, 4, 4), (1, 3, 1, 8, 8)),
    "AutoencoderKLLTXVideo": (
        {
            "block_out_channels": (16, 32, 32, 32), "decoder_block_out_channels": (16, 32, 32, 32),
            "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5, "latent_channels": 8,
        },
        (1, 8, 1, 2, 2),
        (1, 3, 1, 64, 64),
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4, "encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32),
            "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1), "attention_head_dim": 32,
            "encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ()),
        },
        (1, 4, 4, 4),
        (1, 3, 8, 8),
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1), "upsampling_scaling_factor": 2,
        },
        (1, 4, 4, 4),
        (1, 3, 8, 8),
    ),
    "AutoencoderKLWan": (_VIDEO, (1, 4, 1, 4, 4), (1, 3, 1, 8, 8)),
}  # fmt: skip
vaes = pytest.mark.parametrize("name", VAES)


def made(name):
    import diffusers

    torch.manual_seed(0)
    return getattr(diffusers, name)(**VAES[name][0]).eval()


def run(vae, device):
    """A decoded picture, and an encoded one, on the CPU."""
    _, latents, picture = VAES[type(vae).__name__]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        decoded = vae.decode(torch.randn(latents, generator=generator).to(device)).sample
        encoded = vae.encode(torch.randn(picture, generator=generator).to(device))
    if hasattr(encoded, "latent_dist"):
        encoded = encoded.latent_dist.mean
    elif not isinstance(encoded, torch.Tensor):
        encoded = encoded[0]
    return torch.cat([decoded.cpu().flatten(), encoded.cpu().flatten()])


def offload(vae, device, stream=False, **options):
    vae.enable_group_offload(
        onload_device=torch.device(spelled(device)),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=stream,
        **options,
    )
    return vae


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("name", ["AutoencoderKLQwenImage", "AutoencoderKLLTXVideo"])
def test_a_vae_runs(gpu, name):
    check_exact(gpu, name, stream=False)


@vaes
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_every_vae(gpu, name, stream):
    check_exact(gpu, name, stream)


def check_exact(gpu, name, stream):
    device = gpu.devices[0]
    expected = run(made(name).to(device), device)
    before = gpu.allocated(device)
    vae = offload(made(name), device, stream)

    def check(output):
        assert torch.equal(output, expected)
        assert gpu.allocated(device) <= before, "weights stayed on the device"

    for _ in range(2):
        check(run(vae, device))
    assert_goes_on(lambda: run(vae, device), check, (0.5,))


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_what_is_in_no_part(gpu, stream):
    """It is away, as it is upstream, in its place, and a state dict has it in its order."""
    device, name = gpu.devices[0], "AutoencoderKLLTXVideo"
    plain = made(name)
    vae = offload(made(name).to(device), device, stream)
    run(vae, device)
    assert list(vae.state_dict()) == list(plain.state_dict())
    assert vae.latents_mean.device.type == "cpu"
    assert torch.equal(vae.latents_mean, plain.latents_mean)


def test_on_disk(gpu, tmp_path):
    device, name = gpu.devices[0], "AutoencoderKLQwenImage"
    expected = run(made(name).to(device), device)
    vae = offload(made(name), device, offload_to_disk_path=str(tmp_path))
    for _ in range(2):
        assert torch.equal(run(vae, device), expected)


def test_a_whole_pipeline(gpu):
    """``pipe.enable_group_offload``, as the documentation has it."""
    from tests.rig import models

    device = gpu.devices[0]
    vae = made("AutoencoderTiny")
    pipe = models.flux_pipeline(vae=vae)
    pipe.enable_group_offload(
        torch.device(spelled(device)), offload_type="block_level", num_blocks_per_group=1
    )
    expected = run(made("AutoencoderTiny").to(device), device)
    assert torch.equal(run(vae, device), expected)


def by_block(model, device, **options) -> None:
    """``enable_group_offload`` for whatever is a module."""
    from diffusers.hooks import apply_group_offloading

    host = torch.device("cpu")
    apply_group_offloading(
        model, torch.device(device), host, "block_level", num_blocks_per_group=1, **options
    )


def test_names_that_are_given_stay(gpu):
    """By the class or by the caller; and other models are not looked at."""

    def hooked(vae, **options):
        by_block(vae, gpu.devices[0], **options)
        return [name for name, part in vae.named_children() if hasattr(part, "_diffusers_hook")]

    assert hooked(made("AutoencoderKLQwenImage"), block_modules=["decoder"]) == ["decoder"]
    assert "encoder" in hooked(made("AutoencoderKLQwenImage"))
    plain = torch.nn.Module()
    plain.encoder = torch.nn.Linear(1, 1)
    assert hooked(plain) == []


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_applied_again(gpu, stream):
    """As diffusers does with every model of a pipeline after a LoRA was loaded; what is used is the same."""
    from diffusers.hooks.group_offloading import _get_top_level_group_offload_hook as top
    from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading as again

    device, name = gpu.devices[0], "AutoencoderKLLTXVideo"
    expected = run(made(name).to(device), device)
    vae = offload(made(name), device, stream)
    for _ in range(2):
        again(vae)
        assert (top(vae).config.stream is not None) == stream
        for _ in range(2):
            assert torch.equal(run(vae, device), expected)


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_what_is_in_no_part_comes_when_the_model_is_called(gpu, stream):
    """The codebook of a VQModel, for one."""
    import diffusers

    torch.manual_seed(0)
    vae = diffusers.VQModel(block_out_channels=(32,))
    picture = torch.randn(1, 3, 8, 8)
    device = gpu.devices[0]
    with torch.no_grad():
        expected = vae.to(device)(picture.to(device)).sample
        by_block(vae, device, use_stream=stream)
        for _ in range(2):
            assert torch.equal(vae(picture.to(device)).sample, expected)
    assert vae.quantize.embedding.weight.device.type == "cpu"


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@pytest.mark.parametrize("kind", ["Module", "AutoencoderTiny"])
@pytest.mark.parametrize("listed", [False, True], ids=["Sequential", "ModuleList"])
def test_parts_that_are_blocks_already(gpu, stream, kind, listed):
    """They ran before, and are brought layer by layer; in a model of the user, and in a subclass of diffusers' own."""
    import diffusers

    class Own(getattr(diffusers, kind, torch.nn.Module)):
        def __init__(self):
            torch.nn.Module.__init__(self)
            layers = [torch.nn.Linear(8, 8) for _ in range(3)]
            self.encoder = torch.nn.ModuleList(layers) if listed else torch.nn.Sequential(*layers)

        def encode(self, numbers):
            for layer in self.encoder:
                numbers = layer(numbers)
            return numbers

        decode = encode

    device, vae = gpu.devices[0], Own()
    numbers = torch.randn(2, 8).to(device)
    with torch.no_grad():
        expected = vae.to(device).encode(numbers)
        by_block(vae, device, use_stream=stream)
        for _ in range(2):
            assert torch.equal(vae.encode(numbers), expected)
    assert not hasattr(vae.encoder, "_diffusers_hook")


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_a_model_of_the_user_that_reaches_into_its_parts(gpu, stream):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Module()
            self.encoder.proj = torch.nn.Linear(8, 8)

        def encode(self, numbers):
            return self.encoder.proj(numbers)

        decode = forward = encode

    device, model = gpu.devices[0], Own()
    numbers = torch.randn(2, 8).to(device)
    with torch.no_grad():
        expected = model.to(device)(numbers)
        by_block(model, device, use_stream=stream)
        assert torch.equal(model(numbers), expected)
