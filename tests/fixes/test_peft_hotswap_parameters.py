"""peft-hotswap-parameters: a LoRA that is swapped in consists of plain tensors."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models
from tests.fixes.callers import assert_goes_on
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "peft-hotswap-parameters"
SHOWS = r"new\(\) received an invalid combination of arguments|no parameter any more|was changed"
of_diffusers = pytest.mark.skipif(
    bool(unmet("diffusers>=0.33") or unmet("peft>=0.15")),
    reason="diffusers has had hotswap since 0.33.0, with peft 0.15",
)


def swapped(pipe, weights):
    pipe.load_lora_weights(dict(weights), adapter_name="one", hotswap=True)
    return pipe


def loaded(rank: int = 4):
    pipe = models.flux_pipeline()
    pipe.load_lora_weights(lora_models.weights(rank=rank), adapter_name="one")
    return pipe


def latents_of(weights, device):
    """The latents with this LoRA, loaded as the first one."""
    pipe = models.flux_pipeline()
    pipe.load_lora_weights(dict(weights), adapter_name="one")
    pipe.to(device)
    return lora_models.run(pipe, device)


def check_sequential(gpu, rank):
    device = gpu.devices[0]
    new = lora_models.weights(seed=2, rank=rank)
    expected = latents_of(new, device)
    pipe = loaded()
    pipe.enable_sequential_cpu_offload(device=device)
    lora_models.run(pipe, device)
    swapped(pipe, new)

    def equal(latents):
        off = lora_models.distance(latents, expected)
        assert off == 0, f"off by {off}"

    equal(lora_models.run(pipe, device))
    assert_goes_on(lambda: lora_models.run(pipe, device), equal)


@of_diffusers
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_larger_rank_under_sequential_offload(gpu):
    check_sequential(gpu, 8)


@of_diffusers
@pytest.mark.skipif(
    not unmet("peft>=0.20"), reason="peft copies into a weight that is large enough since 0.20.0"
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("rank", [2, 4])
def test_no_larger_rank_under_sequential_offload(gpu, rank):
    check_sequential(gpu, rank)


@of_diffusers
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_has_parameters(gpu):
    pipe = swapped(loaded(), lora_models.weights(seed=2, rank=8))
    found = [name for name, module in pipe.transformer.named_modules() if name.endswith("lora_A.one")]
    assert found
    for name in found:
        weight = pipe.transformer.get_submodule(name).weight
        assert isinstance(weight, torch.nn.Parameter), f"{name}.weight is no parameter any more"


@of_diffusers
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_weights_that_are_passed_stay_as_they_are(gpu):
    """They can be loaded into another pipeline, and what changes one of the two does not change the other."""
    new = lora_models.weights(seed=2, rank=8)
    kept = {name: weight.clone() for name, weight in new.items()}
    pipe = swapped(loaded(), new)
    for name, weight in new.items():
        same = weight.shape == kept[name].shape and torch.equal(weight, kept[name])
        assert same, f"{name} was changed"
    swapped(pipe, lora_models.weights(seed=3, rank=8))
    assert all(torch.equal(weight, kept[name]) for name, weight in new.items()), "a weight was changed"


@of_diffusers
def test_weights_of_another_model_are_refused_as_before(gpu):
    pipe = loaded()
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    other = {name.replace("to_q", "to_nothing"): value for name, value in lora_models.weights(seed=2).items()}
    with pytest.raises(RuntimeError, match=r"unexpected keys|did not succeed"):
        from peft.utils.hotswap import hotswap_adapter_from_state_dict

        hotswap_adapter_from_state_dict(
            model=pipe.transformer,
            state_dict={
                name.removeprefix("transformer.").replace(".weight", ".one.weight"): value
                for name, value in other.items()
            },
            adapter_name="one",
            config=pipe.transformer.peft_config["one"],
        )
    after = pipe.transformer.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_by_peft_itself(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.utils.hotswap import hotswap_adapter

    def adapted(seed):
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(8, 8))
        torch.manual_seed(seed)
        return get_peft_model(
            base, LoraConfig(r=seed, lora_alpha=seed, target_modules=["0"], init_lora_weights=False)
        )

    # A larger rank, or peft copies into the weight; before 0.15 only the same one was swapped.
    second = 1 if unmet("peft>=0.15") else 2
    for seed in (1, second):
        adapted(seed).save_pretrained(tmp_path / str(seed))
    inputs = torch.ones(2, 8)
    model = PeftModel.from_pretrained(adapted(second).unload(), tmp_path / "1")
    hotswap_adapter(model, tmp_path / str(second), adapter_name="default")
    assert torch.equal(model(inputs), adapted(second)(inputs))
    plain = [name for name, module in model.named_modules() if name.endswith("lora_A.default")]
    assert plain and all(
        isinstance(model.get_submodule(name).weight, torch.nn.Parameter) for name in plain
    ), "a weight is no parameter any more"
