"""diffusers-lora-offload-flip: loading a LoRA switches a pipeline to another way of offloading."""

from __future__ import annotations

import contextlib

import pytest

from diffusers_quantfix.offloading.hooks import is_sequentially_offloaded
from tests.fixes import four_bit, lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import without_index as without_index
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-lora-offload-flip"
FLIPPED = (
    r"is sequentially offloaded now|requires accelerator|Torch not compiled with CUDA|other hooks than before"
)

group_offload = pytest.mark.skipif(
    bool(unmet("diffusers>=0.35")), reason="group offload and LoRA: from 0.35 on"
)


@pytest.mark.defect(FIX_ID, shows=FLIPPED)
def test_hooks_that_only_align_inputs_are_no_offload(gpu):
    """As ``dispatch_model`` puts them on a model, and older releases on every 8-bit model."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    here = gpu.devices[0]
    pipe = models.flux_pipeline().to(here)
    hook = AlignDevicesHook(execution_device=here, io_same_device=True)
    add_hook_to_module(pipe.transformer, hook)
    lora_models.load(pipe, "one")
    assert not is_sequentially_offloaded(pipe.transformer), "the transformer is sequentially offloaded now"
    assert pipe.transformer._hf_hook is hook
    assert {parameter.device for parameter in pipe.transformer.parameters()} == {here}
    assert lora_models.distance(lora_models.run(pipe, here), reference("one")) < 1e-5


@pytest.mark.defect(FIX_ID, shows=FLIPPED)
def test_a_component_that_is_not_offloaded_stays_so(gpu):
    """Only one component is offloaded, by its own call."""
    from accelerate import cpu_offload

    here = gpu.devices[0]
    pipe = models.flux_pipeline(text_encoder=models.clip_text()).to(here)
    cpu_offload(pipe.text_encoder, here)
    before = lora_models.hooks_of(pipe)
    pipe.load_lora_weights(lora_models.weights())
    assert not is_sequentially_offloaded(pipe.transformer), "the transformer is sequentially offloaded now"
    assert_same_hooks(pipe, before)


@pytest.mark.defect(FIX_ID, shows=r"other hooks than before")
def test_an_error_leaves_the_hooks(gpu):
    pipe = models.flux_pipeline()
    pipe.enable_sequential_cpu_offload(device=gpu.devices[0])
    before = lora_models.hooks_of(pipe)
    wrong = {name: tensor[..., :-1] for name, tensor in lora_models.weights().items()}
    with pytest.raises((RuntimeError, ValueError)):
        pipe.load_lora_weights(wrong, adapter_name="wrong")
    assert_same_hooks(pipe, before)


def test_an_8bit_model_takes_a_lora_that_is_fused(gpu, tmp_path):
    """In the releases that put hooks on every 8-bit model, `fuse_lora` met weights on meta, without their scales."""
    import torch
    from diffusers import FluxTransformer2DModel

    lora_models.skip_where_flux_takes_no_lora(8)
    here = gpu.devices[0]
    models.saved(models.flux_transformer(), tmp_path)
    pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, bits=8, dtype=torch.float16))
    before = lora_models.run(pipe, here, torch.float16)
    lora_models.load(pipe)
    expected = lora_models.run(pipe, here, torch.float16)
    pipe.fuse_lora(components=["transformer"])
    fused = lora_models.run(pipe, here, torch.float16)
    effect, off = lora_models.distance(expected, before), lora_models.distance(fused, expected)
    assert off < 0.2 * effect, f"fused, off by {off}; the LoRA changes {effect}"
    assert not is_sequentially_offloaded(pipe.transformer)


def test_upstreams_function_by_itself_sees_no_offload():
    """For those who call the loader of one component with ``_pipeline``."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    pipe = models.flux_pipeline()
    add_hook_to_module(pipe.transformer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert not any(type(pipe)._optionally_disable_offloading(pipe))
    assert not any(type(pipe)._optionally_disable_offloading(_pipeline=pipe))
    assert not any(type(pipe)._optionally_disable_offloading(None))
    assert pipe.transformer._hf_hook.io_same_device


def test_every_holder_has_it():
    """``from .lora_base import _func_optionally_disable_offloading`` in other modules."""
    if unmet("diffusers>=0.33"):
        pytest.skip("a method until 0.32")
    from diffusers.loaders import lora_base, peft, unet

    name = "_func_optionally_disable_offloading"
    assert getattr(lora_base, name).__code__.co_filename.endswith("lora_offload_flip.py")
    assert getattr(peft, name) is getattr(unet, name) is getattr(lora_base, name)


@contextlib.contextmanager
def nothing(pipe, here):
    yield pipe.to(here)


def sequential(pipe, here):
    pipe.enable_sequential_cpu_offload(device=spelled(here))


def model_offload(pipe, here):
    pipe.enable_model_cpu_offload(device=spelled(here))


def one_component(pipe, here):
    from accelerate import cpu_offload

    cpu_offload(pipe.transformer, spelled(here))


def spread(pipe, here):
    """Some blocks on the device, some on the CPU, as a device map has it."""
    from accelerate import dispatch_model

    device_map = dict.fromkeys(dict(pipe.transformer.named_children()), here.index)
    device_map["single_transformer_blocks"] = "cpu"
    dispatch_model(pipe.transformer, device_map, main_device=here.index)


def on_the_device(pipe, here):
    pipe.to(here)


PLACEMENTS = [on_the_device, sequential, model_offload, one_component, spread]


@pytest.mark.parametrize("place", PLACEMENTS)
def test_placement_stays_through_the_life_of_adapters(gpu, place):
    """Two LoRAs come, are used together, one goes, both go: always as on a pipeline that was never offloaded."""
    here = gpu.devices[0]
    pipe = models.flux_pipeline()
    place(pipe, here)
    plain = lora_models.run(pipe, here)
    assert lora_models.distance(plain, reference()) < 1e-5
    before = lora_models.hooks_of(pipe)
    placed = placement(pipe.transformer)
    lora_models.load(pipe, "one")
    assert_same_hooks(pipe, before)
    assert lora_models.distance(lora_models.run(pipe, here), reference("one")) < 1e-5
    lora_models.load(pipe, "two")
    pipe.set_adapters(["one", "two"], lora_models.SCALES)
    assert lora_models.distance(lora_models.run(pipe, here), reference("one", "two")) < 1e-5
    pipe.delete_adapters("two")
    pipe.set_adapters("one")
    assert lora_models.distance(lora_models.run(pipe, here), reference("one")) < 1e-5
    pipe.unload_lora_weights()
    assert lora_models.distance(lora_models.run(pipe, here), plain) == 0
    if place is not model_offload:  # whose hooks are made anew after every run
        assert_same_hooks(pipe, before)
    assert placement(pipe.transformer) == placed


@pytest.mark.usefixtures("without_index")
@pytest.mark.parametrize("place", [sequential, model_offload, one_component])
def test_without_an_index_interrupted_and_in_inference_mode(gpu, place):
    here = gpu.devices[0]
    pipe = models.flux_pipeline()
    place(pipe, here)
    before = lora_models.hooks_of(pipe)
    lora_models.load(pipe, "one")
    assert_same_hooks(pipe, before)

    def check(latents):
        assert lora_models.distance(latents, reference("one")) < 1e-5

    assert_goes_on(lambda: lora_models.run(pipe, here), check)


@group_offload
@pytest.mark.usefixtures("without_index")
@pytest.mark.parametrize("stream", [False, True])
def test_group_offload_stays(gpu, stream):
    import torch
    from diffusers.hooks import apply_group_offloading
    from diffusers.hooks.group_offloading import _is_group_offload_enabled

    here = gpu.devices[0]
    pipe = models.flux_pipeline()
    cpu = torch.device("cpu")
    apply_group_offloading(pipe.transformer, spelled(here), cpu, "leaf_level", use_stream=stream)
    lora_models.load(pipe)
    assert _is_group_offload_enabled(pipe.transformer)
    assert not lora_models.hooks_of(pipe)
    assert lora_models.distance(lora_models.run(pipe, here), reference("one", "two")) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("place", [on_the_device, one_component])
def test_quantized_transformer(gpu, tmp_path, bits, place):
    """Offloaded or with the hooks of accelerate: the numbers are those of one that was never offloaded."""
    import torch
    from diffusers import FluxTransformer2DModel

    lora_models.skip_where_flux_takes_no_lora(bits)
    here, runs = gpu.devices[0], []
    models.saved(models.flux_transformer(), tmp_path)
    for apply in (False, True):
        model = four_bit.load(FluxTransformer2DModel, tmp_path, bits=bits)
        pipe = models.flux_pipeline(model)
        if apply and place is one_component:
            one_component(pipe, here)
        before = lora_models.hooks_of(pipe)
        lora_models.load(pipe)
        assert_same_hooks(pipe, before)
        assert is_sequentially_offloaded(model) == (apply and place is one_component)
        runs.append(lora_models.run(pipe, here, torch.float16))
        pipe.delete_adapters("two")
        pipe.unload_lora_weights()
        runs.append(lora_models.run(pipe, here, torch.float16))
    assert lora_models.distance(runs[0], runs[2]) == 0
    assert lora_models.distance(runs[1], runs[3]) == 0
    assert lora_models.distance(runs[0], runs[1]) > 1e-3


@pytest.mark.parametrize("place", [on_the_device, sequential, model_offload])
def test_text_encoder(gpu, place):
    here = gpu.devices[0]
    expected = models.flux_pipeline(text=True).to(here)
    lora_models.load(expected, text=True)
    pipe = models.flux_pipeline(text=True)
    place(pipe, here)
    before = lora_models.hooks_of(pipe)
    lora_models.load(pipe, text=True)
    assert_same_hooks(pipe, before)
    assert lora_models.distance(lora_models.run(pipe, here), lora_models.run(expected, here)) < 1e-5


def reference(*names: str):
    """The run of a pipeline on the CPU that was never offloaded."""
    if names not in _references:
        pipe = models.flux_pipeline()
        _references[names] = lora_models.run(lora_models.load(pipe, *names) if names else pipe)
    return _references[names]


_references: dict = {}


def placement(model) -> dict:
    return {name: str(parameter.device) for name, parameter in model.named_parameters()}


def assert_same_hooks(pipe, before) -> None:
    """Every module that had a hook has the very same one; new layers may have some of their own."""
    after = lora_models.hooks_of(pipe)
    kept = {id(hook): where for hook, where in after.values()}
    lost = [key for key, (hook, where) in before.items() if kept.get(id(hook)) != where]
    assert not lost, f"other hooks than before: {len(lost)} of {len(before)} are gone, {lost[:2]}"
    if not before:
        assert not after, f"other hooks than before: {len(after)}, there was none"
