"""diffusers-load-model-lora-offloaded: an adapter that is loaded into an offloaded model is lost."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models
from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, LEAF, modes
from tests.fixes.group_offloaded import offload as group_offload
from tests.fixes.offloaded import offload
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-load-model-lora-offloaded"
SHOWS = r"off by|not on the expected device|out of meta|KeyError: Parameter containing|on the same device"
needs_method = pytest.mark.skipif(
    bool(unmet("diffusers>=0.32")), reason="models have had load_lora_adapter since 0.32.0"
)


def loaded(pipe):
    pipe.transformer.load_lora_adapter(lora_models.weights(), adapter_name="one")
    return pipe


def check(gpu, place):
    device = gpu.devices[0]
    pipe = models.flux_pipeline()
    pipe.to(device)
    expected = lora_models.run(loaded(pipe), device)
    pipe = models.flux_pipeline()
    place(pipe.transformer, device)

    def equal(latents):
        off = lora_models.distance(latents, expected)
        assert off == 0, f"off by {off}"

    def run():
        return lora_models.run(pipe, device)

    loaded(pipe)
    equal(run())
    assert_goes_on(run, equal)


@needs_method
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_under_sequential_offload(gpu):
    check(gpu, lambda model, device: offload(model, device=device))


@pytest.mark.skipif(
    bool(unmet("diffusers>=0.35")), reason="groups take no LoRA before, of a pipeline neither"
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@modes("leaf-stream", "block-stream")
def test_under_group_offload(gpu, mode):
    check(gpu, lambda model, device: group_offload(model, device, mode))


@pytest.mark.defect(FIX_ID, shows="the new adapter has no data")
def test_a_new_adapter_has_its_data(gpu):
    from peft import LoraConfig

    torch.manual_seed(0)
    model = models.flux_transformer()
    offload(model, device=gpu.devices[0])
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
    factors = [module for name, module in model.named_modules() if name.endswith("lora_A.default")]
    assert factors
    for factor in factors:
        hook = getattr(factor, "_hf_hook", None)
        assert hook is not None and hook.weights_map["weight"].abs().max() > 0, "the new adapter has no data"


@needs_method
def test_an_error_leaves_the_model_offloaded(gpu):
    device = gpu.devices[0]
    pipe = models.flux_pipeline()
    pipe.to(device)
    expected = lora_models.run(pipe, device)
    pipe = models.flux_pipeline()
    offload(pipe.transformer, device=device)
    with pytest.raises(Exception, match=r"size mismatch|shape"):
        bad = {name: tensor[:, :3] for name, tensor in lora_models.weights().items()}
        pipe.transformer.load_lora_adapter(bad, adapter_name="one")
    assert all(parameter.is_meta for parameter in pipe.transformer.parameters())
    assert torch.equal(lora_models.run(pipe, device), expected)


def config(kind: str):
    import peft

    targets = ["to_q", "to_k"]
    if kind == "dora":
        return peft.LoraConfig(r=4, target_modules=targets, use_dora=True, init_lora_weights=False)
    return {"loha": peft.LoHaConfig, "lokr": peft.LoKrConfig}[kind](
        r=4, target_modules=targets, init_weights=False
    )


PLACES = {
    "sequential": lambda model, device: offload(model, device=device),
    "leaf": lambda model, device: group_offload(model, device, LEAF),
    "block": lambda model, device: group_offload(model, device, BLOCK),
}


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
@pytest.mark.parametrize(
    "place",
    [
        name
        if name == "sequential"
        else pytest.param(
            name, marks=pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="groups take none")
        )
        for name in PLACES
    ],
)
def test_kinds_whose_weights_are_read_without_a_call(gpu, kind, place):
    """A DoRA's layer is called with the layer below, a LoHa's and a LoKr's factors are not called at all."""
    device = gpu.devices[0]

    def added(prepare):
        pipe = models.flux_pipeline()
        prepare(pipe.transformer, device)
        torch.manual_seed(3)
        pipe.transformer.add_adapter(config(kind))
        return pipe

    plain = lora_models.run(models.flux_pipeline(), "cpu")
    expected = added(lambda model, device: None)
    expected.to(device)
    expected = lora_models.run(expected, device)
    assert lora_models.distance(plain, expected) > 1e-3
    pipe = added(PLACES[place])
    for _ in range(2):
        assert lora_models.distance(lora_models.run(pipe, device), expected) == 0
