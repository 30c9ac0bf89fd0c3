"""diffusers-shap-e-quantized-renderer: the renderer of Shap-E with quantized layers."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.rig import models
from tests.sweep import backends

FIX_ID = "diffusers-shap-e-quantized-renderer"
SHOWS = (
    r"DID NOT RAISE|is invalid for input of size|same dtype|unimplemented operator"
    # of a mesh without a face, which is what it makes then
    r"|expected a non-empty list of Tensors"
)

torch = pytest.importorskip("torch")

MARLIN = "on a GPU quanto before 0.2.7 packs float8 weights with code that it compiles (quanto-fp8-plain)"
FLOAT8 = pytest.param(
    "quanto-float8", marks=pytest.mark.skipif(bool(unmet("optimum-quanto>=0.2.7")), reason=MARLIN)
)


def shap_e():
    from diffusers.pipelines.shap_e.renderer import ShapERenderer

    torch.manual_seed(0)
    return ShapERenderer(
        param_names=("nerstf.mlp.0.weight", "nerstf.mlp.1.weight"),
        param_shapes=((64, 93), (64, 64)),
        d_latent=64,
        d_hidden=64,
        n_hidden_layers=3,
        insert_direction_at=2,
    ).eval()


def render(model, device, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 128, 64, generator=generator).to(device, torch.bfloat16)
    torch.manual_seed(5)
    images = model.decode_to_image(
        latents, device, size=4, ray_batch_size=64, n_coarse_samples=4, n_fine_samples=4
    )
    return torch.cat([image.flatten() for image in images]).float().cpu()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("diffusers")
    return models.saved(shap_e(), tmp_path_factory.mktemp("shap_e"))


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8", "quanto-int8", FLOAT8, "torchao-int8"])
@pytest.mark.parametrize("what", ["image", "mesh"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.42", "torchao>=0.18"))
def test_a_quantized_one_is_refused(gpu, folder, name, what):
    from diffusers.pipelines.shap_e.renderer import ShapERenderer

    device = gpu.devices[0]
    model = backends.ALL_BACKENDS[name](folder, torch.bfloat16, model_class=ShapERenderer)
    if name != "bnb-int8":
        model.to(device)
    before = {key: value._version for key, value in model.named_parameters()}
    with pytest.raises(ValueError, match="the renderer of Shap-E cannot be quantized"):
        if what == "image":
            render(model, device)
        else:
            model.decode_to_mesh(
                torch.zeros(1, 128, 64, device=device, dtype=torch.bfloat16), device, grid_size=2
            )
    assert {key: value._version for key, value in model.named_parameters()} == before, "nothing was changed"


def test_a_plain_one_renders(gpu, folder):
    from diffusers.pipelines.shap_e.renderer import ShapERenderer

    device = gpu.devices[0]
    model = ShapERenderer.from_pretrained(folder, torch_dtype=torch.bfloat16).to(device)
    assert not torch.equal(render(model, device), render(model, device, seed=2))
