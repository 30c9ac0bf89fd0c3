"""accelerate-parameter-containers: LoKr and LoHa cannot run under sequential offload."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import lycoris_models, offloaded
from tests.fixes.callers import assert_stays_exact
from tests.fixes.callers import spelling as spelling

torch = pytest.importorskip("torch")

FIX_ID = "accelerate-parameter-containers"
SHOWS = r"not on the expected device|off by|on the same device"

each_kind = pytest.mark.parametrize("kind", lycoris_models.KINDS)


def assert_equal(output, expected):
    assert torch.equal(output, expected), f"off by {(output - expected).abs().max()}"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@each_kind
def test_under_offload(gpu, kind):
    check_offloaded(gpu.devices[0], gpu, kind)


def test_on_4bit_layers(gpu):
    check_offloaded(gpu.devices[0], gpu, lycoris_models.QUANTIZED)


def check_offloaded(device, gpu, kind):
    from accelerate.hooks import remove_hook_from_submodules

    expected = lycoris_models.run(lycoris_models.build(kind, device), device)
    before = gpu.allocated(device)
    model = lycoris_models.build(kind, device).to("cpu")
    offloaded.offload(model, device=device)

    assert_stays_exact(gpu, device, lambda: lycoris_models.run(model, device), expected, before)
    remove_hook_from_submodules(model)
    assert_equal(lycoris_models.run(model.to(device), device), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@each_kind
def test_from_the_disk(gpu, kind, tmp_path):
    from accelerate import disk_offload

    device = gpu.devices[0]
    expected = lycoris_models.run(lycoris_models.build(kind, device), device)
    model = disk_offload(lycoris_models.build(kind, "cpu"), str(tmp_path), device)
    for _ in range(2):
        assert_equal(lycoris_models.run(model, device), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_on_the_cpu():
    """There torch reads memory that nobody has written, without an error."""
    expected = lycoris_models.run(lycoris_models.build("LoKr", "cpu"), "cpu")
    model = lycoris_models.build("LoKr", "cpu")
    offloaded.offload(model)
    assert_equal(lycoris_models.run(model, "cpu"), expected)


def test_the_hook_is_copied_and_pickled_with_its_model(gpu):
    model = lycoris_models.build("LoKr", "cpu")
    expected = lycoris_models.run(model, "cpu")
    offloaded.offload(model)
    hooked = next(module for module in model.modules() if hasattr(module, "lokr_w1"))
    assert_equal(lycoris_models.run(copy.deepcopy(model), "cpu"), expected)
    assert pickle.loads(pickle.dumps(hooked._hf_hook)).pre_forward is hooked._hf_hook.pre_forward


def quantizer():
    """Of a VQModel; its embedding is not called."""
    vae = pytest.importorskip("diffusers.models.autoencoders.vae")
    torch.manual_seed(0)
    return vae.VectorQuantizer(8, 4, beta=0.25, sane_index_shape=False)


def siglip():
    """The embeddings of SigLIP 2, which reads the weight of those of positions."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Siglip2VisionConfig"):
        pytest.skip("this transformers has no SigLIP 2")
    module = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=2, num_patches=4, num_channels=1)
    return module.Siglip2VisionEmbeddings(config)


def of_quantizer(model, device):
    return model(torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(1)).to(device))[0].cpu()


def of_siglip(model, device):
    patches = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(1)).to(device)
    return model(patches, torch.tensor([[2, 2]], device=device)).detach().cpu()


@pytest.mark.defect(FIX_ID, shows=rf"{SHOWS}|must have the same device type")
@pytest.mark.parametrize(
    ("build", "run"), [(quantizer, of_quantizer), (siglip, of_siglip)], ids=["quantizer", "siglip"]
)
def test_an_embedding_whose_weight_is_read(gpu, build, run):
    device = gpu.devices[0]
    with torch.no_grad():
        expected = run(build().to(device), device)
        before = gpu.allocated(device)
        model = build()
        offloaded.offload(model, device=device)

        assert_stays_exact(gpu, device, lambda: run(model, device), expected, before)


def condition_encoder():
    """ACE-Step's; its pipeline reads two tensors of it."""
    ace_step = pytest.importorskip("diffusers.pipelines.ace_step.modeling_ace_step")
    torch.manual_seed(0)
    return ace_step.AceStepConditionEncoder(
        hidden_size=64,
        intermediate_size=128,
        text_hidden_dim=32,
        timbre_hidden_dim=64,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ).requires_grad_(False)


READ_OUTSIDE = ("silence_latent", "null_condition_emb")


@pytest.mark.defect(FIX_ID, shows="Cannot copy out of meta tensor")
def test_what_a_pipeline_reads(gpu):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    device = gpu.devices[0]
    inputs = [torch.randn(1, 4, width, generator=torch.Generator().manual_seed(width)) for width in (32, 64)]
    mask, first = torch.ones(1, 4), torch.zeros(1, dtype=torch.long)

    def run(model):
        """As the pipeline does: read one, call the model, read the other."""
        silence = model.silence_latent[:, :4].to(device)
        text, lyric = inputs[0].to(device), inputs[0].to(device)
        states, _ = model(text, mask.to(device), lyric, mask.to(device), silence, first.to(device))
        return (states + model.null_condition_emb.to(device)).cpu()

    with torch.no_grad():
        expected, before = run(condition_encoder().to(device)), gpu.allocated(device)
        model = condition_encoder()
        cpu_offload(
            model, device, offload_buffers=True
        )  # as diffusers does it for a model with parameters of its own

        assert_stays_exact(gpu, device, lambda: run(model), expected, before)
        remove_hook_from_submodules(model)
        assert {name: getattr(model, name).device.type for name in READ_OUTSIDE} == dict.fromkeys(
            READ_OUTSIDE, "cpu"
        )
        assert_equal(run(model.to(device)), expected)


def test_what_a_pipeline_reads_from_the_disk(gpu, tmp_path):
    from accelerate import disk_offload

    expected, model = condition_encoder(), condition_encoder()
    disk_offload(model, str(tmp_path), gpu.devices[0], offload_buffers=True)
    for name in READ_OUTSIDE:
        assert_equal(getattr(model, name), getattr(expected, name))


DORA = {
    "linear": lambda: torch.nn.Linear(8, 8),
    "convolution": lambda: torch.nn.Conv2d(4, 4, 3, padding=1),
    "embedding": lambda: torch.nn.Embedding(8, 8),
}


def with_dora(kind):
    """A layer with a trained DoRA."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(DORA[kind]())
    config = LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False)
    try:
        return inject_adapter_in_model(config, model).eval()
    except (AttributeError, NotImplementedError, ValueError, TypeError) as error:
        pytest.skip(f"this peft has no DoRA for it: {error}")


def through_dora(model, kind, device):
    shape = {"linear": (2, 8), "convolution": (1, 4, 5, 5), "embedding": (2, 3)}[kind]
    generator = torch.Generator().manual_seed(1)
    given = (
        torch.randint(0, 8, shape, generator=generator)
        if kind == "embedding"
        else torch.randn(shape, generator=generator)
    )
    with torch.no_grad():
        return model(given.to(device)).cpu()


@pytest.mark.defect(FIX_ID, shows=rf"{SHOWS}|Cannot copy out of meta tensor")
@pytest.mark.parametrize("kind", DORA)
def test_layers_that_a_dora_is_called_with(gpu, kind):
    from accelerate.hooks import remove_hook_from_submodules

    pytest.importorskip("peft.tuners.lora.dora")
    device = gpu.devices[0]
    expected = through_dora(with_dora(kind).to(device), kind, device)
    model, before = with_dora(kind), gpu.allocated(device)
    offloaded.offload(model, device=device)

    assert_stays_exact(gpu, device, lambda: through_dora(model, kind, device), expected, before)
    copied = copy.deepcopy(model)
    assert_equal(through_dora(copied, kind, device), expected)
    remove_hook_from_submodules(model)
    assert_equal(through_dora(model.to(device), kind, device), expected)


@pytest.mark.parametrize("kind", DORA)
def test_a_dora_from_the_disk(gpu, kind, tmp_path):
    from accelerate import disk_offload

    pytest.importorskip("peft.tuners.lora.dora")
    device = gpu.devices[0]
    expected = through_dora(with_dora(kind).to(device), kind, device)
    model = disk_offload(with_dora(kind), str(tmp_path), device)
    for _ in range(2):
        assert_equal(through_dora(model, kind, device), expected)
