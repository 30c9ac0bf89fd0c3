"""diffusers-fuse-lora-offloaded: fusing a LoRA into an offloaded pipeline has no effect."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.fixes.callers import spelled, stopped_at_each_line
from tests.fixes.callers import without_index as without_index
from tests.fixes.group_offloaded import LEAF, STREAM
from tests.fixes.group_offloaded import offload as offload_groups
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-fuse-lora-offloaded"
SHOWS = r"(the fused|the disabled|the unfused) .* is off by"

group_offload = pytest.mark.skipif(
    bool(unmet("diffusers>=0.35")), reason="group offload and LoRA: from 0.35 on"
)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_fused_lora_has_its_effect():
    """Plain CPU: ``accelerate.cpu_offload`` really puts the weights on meta."""
    fuse_and_unfuse(loaded("cpu"), loaded(), "cpu")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_text_encoder():
    """By itself: how a pipeline runs it under offload on the CPU is another matter."""
    pipe, expected = (
        lora_models.load(models.flux_pipeline(text_encoder=models.clip_text()), text=True) for _ in range(2)
    )
    offload(pipe.text_encoder, "cpu")
    for said, act in (
        ("fused", lambda one: one.fuse_lora(components=["text_encoder"])),
        ("unfused", lambda one: one.unfuse_lora(components=["text_encoder"])),
    ):
        for one in (pipe, expected):
            act(one)
        off = lora_models.distance(encoded(pipe), encoded(expected))
        assert off < 1e-5, f"the {said} text encoder is off by {off}"


def encoded(pipe):
    import torch

    with torch.no_grad():
        return pipe.text_encoder(torch.tensor([[2, 5, 6, 3]])).last_hidden_state


@pytest.mark.usefixtures("without_index")
@pytest.mark.defect(FIX_ID, shows=SHOWS + "|same device", needs="diffusers>=0.35")
def test_group_offload_with_a_stream(gpu):
    grouped(gpu, "leaf_level", stream=True)


@group_offload
@pytest.mark.parametrize(
    ("level", "stream"), [("leaf_level", False), ("block_level", False), ("block_level", True)]
)
def test_group_offload(gpu, level, stream):
    grouped(gpu, level, stream)


def grouped(gpu, level, stream):
    import torch
    from diffusers.hooks import apply_group_offloading

    here = gpu.devices[0]
    pipe = loaded()
    blocks = 1 if level == "block_level" else None
    cpu = torch.device("cpu")
    apply_group_offloading(pipe.transformer, spelled(here), cpu, level, blocks, use_stream=stream)
    fuse_and_unfuse(pipe, loaded(), here, GROUPED_LIFE)


@pytest.mark.usefixtures("without_index")
def test_sequential_offload_on_a_device(gpu):
    """The weights are on the device for one layer at a time."""
    here = gpu.devices[0]
    pipe = loaded(here)
    before = gpu.allocated(here)
    gpu.reset()
    pipe.fuse_lora(components=["transformer"])
    layer = max(p.nbytes for p in models.flux_transformer().parameters())
    assert gpu.peak(here) <= before + 6 * layer
    assert gpu.allocated(here) <= before
    fuse_and_unfuse(loaded(here), loaded(), here)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_transformer(gpu, tmp_path, bits):
    """What is fused is quantized anew: the same bytes as in a model that was never offloaded."""
    import torch
    from diffusers import FluxTransformer2DModel

    lora_models.skip_where_flux_takes_no_lora(bits)
    here = gpu.devices[0]
    models.saved(models.flux_transformer(), tmp_path)
    runs = []
    for offloaded in (False, True):
        pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, bits=bits))
        lora_models.load(pipe)
        if offloaded:
            offload(pipe.transformer, here)
        for act in (pipe.fuse_lora, pipe.unfuse_lora):
            act(components=["transformer"])
            runs += [lora_models.run(pipe, here, torch.float16) for _ in range(2)]
    fused, unfused = runs[:2], runs[2:4]
    assert lora_models.distance(fused[0], unfused[0]) > 0
    assert [lora_models.distance(*pair) for pair in zip(runs[:4], runs[4:], strict=True)] == [0] * 4


def adapted(device, kind=None):
    """Two layers with an adapter, offloaded from ``device`` or on it."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).requires_grad_(False)
    config = LoraConfig(target_modules=["0", "1"], r=2, init_lora_weights=False)
    model = inject_adapter_in_model(config, model).eval()
    if kind is None:
        return model.to(device)
    if kind == "sequential":
        return cpu_offload(model, spelled(device))
    offload_groups(model, device, LEAF | (STREAM if kind == "leaf, stream" else {}))
    return model


def without(model):
    """The same model, its adapter disabled."""
    for layer in model:
        layer.enable_adapters(False)
    return model


def computed(model, device):
    import torch

    with torch.no_grad():
        return model(torch.linspace(-1, 1, 32).reshape(2, 16).to(device)).cpu()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["sequential", *(pytest.param(kind, marks=group_offload) for kind in ("leaf", "leaf, stream"))],
)
def test_interrupted_at_each_line(gpu, kind):
    """Each layer is either merged or not, and has the weights for it; the model stays offloaded."""
    import torch

    from diffusers_quantfix import finishing
    from diffusers_quantfix.adapters import merging
    from diffusers_quantfix.offloading import suspended

    device = gpu.devices[0]
    before = gpu.allocated(device)
    expected, base = computed(adapted(device), device), computed(without(adapted(device)), device)
    assert not torch.allclose(expected, base, atol=1e-2)

    def merge(model, verb="merge"):
        with merging.merges_reach_weights(model):
            for layer in model:
                if verb == "merge" or layer.merged:
                    getattr(layer, verb)()

    trials = 0
    for model in stopped_at_each_line(lambda: adapted(device, kind), merge, merging, suspended, finishing):
        trials += 1
        assert not any({"merge", "unmerge"} & vars(layer).keys() for layer in model)
        torch.testing.assert_close(computed(model, device), expected)
        merge(model, "unmerge")
        torch.testing.assert_close(computed(model, device), expected)
        torch.testing.assert_close(computed(without(model), device), base)
        assert gpu.allocated(device) == before, "bytes stayed on the device"
    assert trials > 50


@pytest.mark.long
def test_a_layer_that_comes_in_interrupted_at_each_line(gpu):
    """The old or the new layer computes, offloaded, and its weights come back."""
    import accelerate.hooks
    import torch

    from diffusers_quantfix import finishing
    from diffusers_quantfix.offloading import suspended

    device = gpu.devices[0]

    def offloaded():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).requires_grad_(False)
        return accelerate.cpu_offload(model, spelled(device))

    def exchange(model):
        with suspended.hooks_aside(model):
            torch.manual_seed(1)
            model[1] = torch.nn.Linear(16, 16).requires_grad_(False)

    old, new = offloaded(), offloaded()
    exchange(new)
    expected = [computed(model, device) for model in (old, new)]
    assert not torch.equal(*expected)
    before, trials = gpu.allocated(device), 0
    for model in stopped_at_each_line(offloaded, exchange, accelerate.hooks, suspended, finishing):
        trials += 1
        for _ in range(2):
            output = computed(model, device)
            assert any(torch.equal(output, one) for one in expected)
        assert gpu.allocated(device) == before, "bytes stayed on the device"
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert torch.equal(computed(model.to("cpu"), "cpu"), computed(model.to(device), device))
        model.to("cpu")
    assert trials > 50


def test_every_adapter_goes_with_its_scale_and_its_name():
    pipe, expected = loaded("cpu"), loaded()
    for one in (pipe, expected):
        one.fuse_lora(components=["transformer"], adapter_names=["two"], lora_scale=0.5, safe_fusing=True)
    same(pipe, expected, "cpu", "fused")
    assert pipe.fused_loras == expected.fused_loras if hasattr(pipe, "fused_loras") else True
    for one in (pipe, expected):
        one.unload_lora_weights()
    same(pipe, expected, "cpu", "fused and unloaded")


def test_nothing_is_left_on_the_layers():
    import copy
    import pickle

    pipe = loaded("cpu")
    pipe.fuse_lora(components=["transformer"])
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in pipe.transformer.modules():
        if isinstance(layer, BaseTunerLayer):
            assert not {"merge", "unmerge"} & vars(layer).keys()
    assert pickle.dumps(copy.deepcopy(loaded().transformer))


LIFE = ("fuse", "disable", "enable", "fuse", "unfuse", "delete", "unload")
# Where a stream fetches ahead, which layers run is traced once; "enable" and, in 0.35, "delete" do not trace anew.
GROUPED_LIFE = ("fuse", "unfuse", "fuse", "disable", "unload")


def fuse_and_unfuse(pipe, expected, where, life=LIFE):
    """Through all of ``life`` ``pipe`` does as ``expected``, which is not offloaded."""
    steps = {
        "fuse": ("fused", lambda one: one.fuse_lora(components=["transformer"])),
        "unfuse": ("unfused", lambda one: one.unfuse_lora(components=["transformer"])),
        "disable": ("disabled", lambda one: one.disable_lora()),
        "enable": ("enabled", lambda one: one.enable_lora()),
        "delete": ("left", lambda one: one.delete_adapters("two")),
        "unload": ("unloaded", lambda one: one.unload_lora_weights()),
    }
    same(pipe, expected, where, "loaded")
    for said, act in (steps[name] for name in life):
        act(pipe)
        act(expected)
        same(pipe, expected, where, said)


def same(pipe, expected, where, said):
    off = lora_models.distance(lora_models.run(pipe, where), lora_models.run(expected, "cpu"))
    assert off < 1e-5, f"the {said} pipeline is off by {off}"


def loaded(where=None):
    """A pipeline with both LoRAs, its transformer offloaded from ``where`` if that is given."""
    pipe = lora_models.load(models.flux_pipeline())
    if where is not None:
        offload(pipe.transformer, where)
    return pipe


def offload(component, device):
    from accelerate import cpu_offload

    cpu_offload(component, spelled(device))
