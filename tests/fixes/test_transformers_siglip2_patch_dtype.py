"""transformers-siglip2-patch-dtype: the image of a quantized SigLIP 2 reaches its first layer."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.rig import models

FIX_ID = "transformers-siglip2-patch-dtype"
# The last is that of releases in which no quantized model of transformers can be loaded without the package.
SHOWS = r"the output differs by|does not depend on the image|Char|Byte|requires gradients must be floating"
PATCHES = 16

torch = pytest.importorskip("torch")


def siglip2():
    siglip = pytest.importorskip("transformers.models.siglip2", reason="SigLIP 2 came with transformers 4.50")
    torch.manual_seed(0)
    return siglip.modeling_siglip2.Siglip2VisionModel(
        siglip.configuration_siglip2.Siglip2VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_channels=4,
            num_patches=PATCHES,
            patch_size=4,
            # Its attention fails with a quantized layer in transformers 5.0 and older, with an error.
            vision_use_head=False,
        )
    ).eval()


def run(model, device, seed: int = 0, dtype=None):
    """The states of an image whose pixels are between -1 and 1, as the processor makes them."""
    pixels = torch.rand(1, PATCHES, 64, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    with torch.no_grad():
        return (
            model(
                pixels.to(device, dtype or torch.float32),
                torch.ones(1, PATCHES, dtype=torch.long, device=device),
                torch.tensor([[4, 4]], device=device),
            )
            .last_hidden_state.float()
            .cpu()
        )


DEFECT = pytest.mark.defect(FIX_ID, shows=SHOWS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bits": 4}, marks=DEFECT, id="4-bit"),
        # harmless without the package: the pixels are rounded to the dtype of the storage
        pytest.param({"bits": 4, "bnb_4bit_quant_storage": torch.bfloat16}, id="4-bit in bfloat16"),
        pytest.param({"bits": 8}, marks=DEFECT, id="8-bit"),
    ],
)
def test_a_model_from_a_checkpoint(gpu, tmp_path, options):
    plain, device = siglip2(), gpu.devices[0]
    folder = models.saved(plain, tmp_path)
    model = four_bit.load(type(plain), folder, dtype=torch.float16, device_map={"": 0}, **options)
    expected, out = run(plain, "cpu"), run(model, device, dtype=torch.float16)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < {4: 0.3, 8: 0.05}[options["bits"]], f"the output differs by {error:.0%}"
    other = run(model, device, seed=1, dtype=torch.float16)
    assert not torch.allclose(out, other, atol=1e-3), "the output does not depend on the image"
    assert torch.equal(run(model, device, dtype=torch.float16), out)


def test_each_spelling_and_after_a_run_that_ended(gpu, tmp_path, each_spelling):
    plain, device = siglip2(), gpu.devices[0]
    folder = models.saved(plain, tmp_path)
    model = four_bit.load(type(plain), folder, dtype=torch.float16, device_map={"": spelled(device)})
    expected = run(plain, "cpu")

    def check(out):
        error = ((out - expected).norm() / expected.norm()).item()
        assert error < 0.3, f"the output differs by {error:.0%}"

    assert_goes_on(lambda: run(model, device, dtype=torch.float16), check)


def test_a_plain_model_is_as_before(gpu):
    device = gpu.devices[0]
    plain = siglip2()
    expected = run(plain, "cpu")
    torch.testing.assert_close(run(plain.to(device), device), expected)
