"""diffusers-set-adapters-unknown-model: adapters of a class that a table does not list."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models
from tests.rig import models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-set-adapters-unknown-model"
SHOWS = "KeyError"


def listed() -> set:
    from diffusers.loaders import peft

    return set(peft._SET_ADAPTER_SCALE_FN_MAPPING)


def of(cls, loaded=("one", "two")):
    model = models.flux_transformer()
    pipe = models.flux_pipeline(cls.from_config(model.config).eval())
    pipe.transformer.load_state_dict(model.state_dict())
    for name in loaded:
        pipe.load_lora_weights(lora_models.weights(1 + loaded.index(name)), adapter_name=name)
    return pipe


@pytest.fixture
def own():
    return type("OwnTransformer", (diffusers.FluxTransformer2DModel,), {})


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("chosen", [("one", None), (["one", "two"], [0.5, 1.0]), (["two"], 0.3)], ids=str)
def test_a_class_of_the_program(own, chosen):
    """The same as with the class that it is derived from."""
    expected, found = of(diffusers.FluxTransformer2DModel), of(own)
    for pipe in (expected, found):
        pipe.set_adapters(*chosen)
    assert found.get_active_adapters() == expected.get_active_adapters()
    assert torch.equal(lora_models.run(found), lora_models.run(expected))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_of_the_model_alone(own):
    expected, found = of(diffusers.FluxTransformer2DModel), of(own)
    for pipe in (expected, found):
        pipe.transformer.set_adapters(["one", "two"], weights=[0.3, None])
    assert torch.equal(lora_models.run(found), lora_models.run(expected))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_every_class_of_diffusers_that_takes_adapters():
    """Each is in the table, or gets its default."""
    from diffusers.loaders import peft

    names = [name for name in dir(diffusers) if name.endswith(("Model", "UNet")) and name[0].isupper()]
    kinds = [getattr(diffusers, name) for name in names]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, peft.PeftAdapterMixin)]
    assert len(kinds) > 5
    before = listed()
    for kind in kinds:
        scale = peft._SET_ADAPTER_SCALE_FN_MAPPING[kind.__name__]
        if kind.__name__ not in before:
            assert scale(None, [0.5]) == [0.5]


def test_what_a_program_adds_is_kept(own):
    """As programs do it that were written for these releases."""
    from diffusers.loaders import peft

    import diffusers_quantfix

    seen = []
    peft._SET_ADAPTER_SCALE_FN_MAPPING["OwnTransformer"] = lambda model, weights: (
        seen.append(model) or weights
    )
    try:
        pipe = of(own)
        pipe.set_adapters("one")
        assert seen == [pipe.transformer]
        diffusers_quantfix.revert(FIX_ID)
        assert "OwnTransformer" in listed()
    finally:
        diffusers_quantfix.apply(FIX_ID)
        del peft._SET_ADAPTER_SCALE_FN_MAPPING["OwnTransformer"]
    assert "OwnTransformer" not in listed()


def test_blocks_of_a_unet_are_still_scaled_one_by_one():
    from diffusers.loaders import peft

    scales = peft._SET_ADAPTER_SCALE_FN_MAPPING["UNet2DConditionModel"]
    assert scales is peft._maybe_expand_lora_scales
