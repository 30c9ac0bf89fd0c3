"""diffusers-unet-lora: a LoRA for the UNet of a text-to-video pipeline, and of Kandinsky 3."""

from __future__ import annotations

import pickle

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import LEAF
from tests.fixes.group_offloaded import offload as group_offload
from tests.gate import unmet
from tests.marks import rest_is_long
from tests.rig import models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft", reason="peft is not installed")

TARGETS = {"UNet3DConditionModel": "diffusers-unet3d-lora", "Kandinsky3UNet": "diffusers-kandinsky3-lora"}
SHOWS = r"has no attribute '(load_lora_adapter|unload_lora|set_adapters|fuse_lora)'"
NEEDS = {"UNet3DConditionModel": "diffusers>=0.31", "Kandinsky3UNet": "diffusers>=0.32"}
each_unet = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.defect(fix, shows=SHOWS),
                pytest.mark.skipif(
                    bool(unmet(NEEDS[name])),
                    reason="before, a pipeline calls a method for it that no base class has",
                ),
            ],
        )
        for name, fix in TARGETS.items()
    ],
)


def built(name):
    from diffusers_quantfix.verify.models import unets

    model = unets.unet(name)
    return model, unets.pipeline(model)


def run(model, device="cpu"):
    from diffusers_quantfix.verify.models import unets

    return unets.run(model, device)


def weights(model, seed=1):
    from diffusers_quantfix.verify.models import lora

    found = lora.weights(model, "unet")
    return {name: tensor * seed for name, tensor in found.items()}


def merged(name, *loras):
    """The output of a model into whose weights the LoRAs were added by hand."""
    model, _ = built(name)
    layers = dict(model.named_modules())
    with torch.no_grad():
        for state, scale in loras:
            for key in (key for key in state if ".lora_A." in key):
                down, up = state[key], state[key.replace("lora_A", "lora_B")]
                layers[key.removeprefix("unet.").partition(".lora_A")[0]].weight += scale * up @ down
    return run(model)


def close(one, other):
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@each_unet
def test_a_lora_is_loaded(name):
    model, pipe = built(name)
    without, one = run(model), weights(model)
    two = weights(model, seed=-0.5)
    pipe.load_lora_weights(dict(one), adapter_name="one")
    assert close(run(model), merged(name, (one, 1)))
    assert not close(run(model), without)
    pipe.load_lora_weights(dict(two), adapter_name="two")
    pipe.set_adapters(["one", "two"], [0.5, 1.0])
    assert close(run(model), merged(name, (one, 0.5), (two, 1)))
    pipe.set_adapters("two")
    assert pipe.get_active_adapters() == ["two"]
    assert close(run(model), merged(name, (two, 1)))
    pipe.delete_adapters("two")
    pipe.disable_lora()
    assert close(run(model), without)
    pipe.enable_lora()
    pipe.unload_lora_weights()
    assert close(run(model), without)


@each_unet
def test_it_is_fused_and_saved(name, tmp_path):
    from peft.utils import get_peft_model_state_dict

    model, pipe = built(name)
    without, one = run(model), weights(model)
    pipe.load_lora_weights(dict(one), adapter_name="one")
    with_lora = run(model)
    pipe.save_lora_weights(tmp_path, unet_lora_layers=get_peft_model_state_dict(model, adapter_name="one"))
    pipe.fuse_lora(components=["unet"])
    assert close(run(model), with_lora)
    pipe.unfuse_lora(components=["unet"])
    assert close(run(model), with_lora)
    pipe.unload_lora_weights()
    assert close(run(model), without)
    again, other = built(name)
    other.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors", adapter_name="one")
    assert torch.equal(run(again), with_lora)


@each_unet
@pytest.mark.skipif(bool(unmet("diffusers>=0.32")), reason="before, a model has no such method")
def test_the_model_itself_loads_one(name):
    model, _ = built(name)
    one = {key.removeprefix("unet."): tensor for key, tensor in weights(model).items()}
    model.load_lora_adapter(one, prefix=None, adapter_name="one")
    assert close(run(model), merged(name, (weights(built(name)[0]), 1)))


@each_unet
@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="before, a quantized model takes no device_map")
@pytest.mark.parametrize("bits", rest_is_long([4, 8], 8))
def test_quantized_and_offloaded(gpu, name, bits, tmp_path):
    device = gpu.devices[0]
    models.saved(built(name)[0], tmp_path)

    def loaded():
        from diffusers_quantfix.verify.models import unets

        with four_bit.skip_for_other_reasons():
            model = models.load_quantized(
                getattr(diffusers, name), tmp_path, bits, {"": spelled(device)}, torch.float32
            )
        pipe = unets.pipeline(model)
        pipe.load_lora_weights(weights(built(name)[0]), adapter_name="one")
        return model, pipe

    model, _ = loaded()
    expected = run(model, device)
    model, pipe = loaded()
    pipe.enable_model_cpu_offload(device=spelled(device))

    def check(output):
        assert torch.equal(output, expected)

    check(run(model, device))
    assert_goes_on(lambda: run(model, device), check)
    pipe.remove_all_hooks()
    pipe.unload_lora_weights()
    pipe.load_lora_weights(weights(built(name)[0]), adapter_name="again")
    pipe.enable_model_cpu_offload(device=spelled(device))
    # Some releases load the second LoRA in another dtype.
    assert torch.allclose(run(model, device), expected, rtol=1e-2, atol=1e-2)


@each_unet
@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="groups take no LoRA before")
def test_under_group_offload(gpu, name):
    device = gpu.devices[0]
    model, pipe = built(name)
    pipe.load_lora_weights(weights(model), adapter_name="one")
    expected = run(model.to(device), device)
    model, pipe = built(name)
    group_offload(model, device, LEAF)
    pipe.load_lora_weights(weights(built(name)[0]), adapter_name="one")
    for _ in range(2):
        assert torch.equal(run(model, device), expected)


@each_unet
def test_the_class_is_what_it_was_but_for_the_methods(name):
    from diffusers.loaders.peft import PeftAdapterMixin

    cls = getattr(diffusers, name)
    model, _ = built(name)
    own = type("Own", (cls,), {})
    assert callable(cls.unload_lora) and own.unload_lora is PeftAdapterMixin.unload_lora
    assert pickle.loads(pickle.dumps(cls)) is cls and isinstance(model, PeftAdapterMixin)
    assert not model._hf_peft_config_loaded
    without = run(model)
    assert torch.equal(run(pickle.loads(pickle.dumps(model))), without)


def test_taken_out_and_put_in_again():
    import diffusers_quantfix

    cls = diffusers.UNet3DConditionModel
    before = cls.__bases__
    try:
        diffusers_quantfix.revert("diffusers-unet-lora")
        assert not hasattr(cls, "unload_lora") and not hasattr(diffusers.Kandinsky3UNet, "unload_lora")
        assert len(cls.__bases__) == len(before) - 1
    finally:
        diffusers_quantfix.apply("diffusers-unet-lora")
    assert cls.__bases__ == before
