"""peft-unmerge-torchao: a LoRA taken out of weights of torchao leaves the bits that there were."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product

import pytest

from tests.fixes import lora_models as lora
from tests.fixes import mapped
from tests.fixes import torchao_models as ao
from tests.fixes.merged import KEPT, OFFLOADS, assert_same, bits, kept, layers_of, plain, without_memory
from tests.gate import unmet
from tests.marks import in_turn, rest_is_long
from tests.rig import models

FIX_ID = "peft-unmerge-torchao"
SHOWS = "not what it was"
pytestmark = pytest.mark.skipif(
    bool(unmet("peft>=0.14") or unmet("torchao")), reason="needs torchao, and peft 0.14, which knows it first"
)
formats = pytest.mark.parametrize("weights", ["int8", "float8", "int4"])


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torchao")
@formats
def test_merged_and_taken_out_again(gpu, weights):
    """Twice; the packed bytes and the output are what they were."""
    import torch

    here = gpu.devices[0]
    model = ao.adapted(weights, here)
    with_lora, before = ao.run(model, here), bits(model)
    for _ in range(2):
        model.merge_adapter()
        merged = ao.run(model, here)
        assert 0 < lora.distance(merged, with_lora) < 0.5 * with_lora.abs().max()
        model.unmerge_adapter()
        assert_same(bits(model), before)
        assert torch.equal(ao.run(model, here), with_lora), "the output is not what it was"
        assert not kept(model)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torchao")
@formats
def test_on_the_cpu(weights):
    model = ao.adapted(weights)
    before = bits(model)
    names, kinds = list(dict(model.named_parameters())), [type(tensor) for tensor in model.parameters()]
    for part in layers_of(model):  # not every peft passes it on
        part.merge(safe_merge=True)
    model.unmerge_adapter()
    assert_same(bits(model), before)
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert sorted(map(str, kinds)) == sorted(str(type(tensor)) for tensor in model.parameters())
    for part in layers_of(model):
        weight = part.get_base_layer().weight
        assert not weight.requires_grad and repr(part)


@formats
def test_moved_between(gpu, weights):
    """The bits come to where the weight is now, and its wrapper says so."""
    import torch

    here, there = gpu.two
    model = ao.adapted(weights, here)
    with_lora, before = ao.run(model, here), bits(model)
    model.merge_adapter()
    model.to(there)
    model.unmerge_adapter()
    for part in layers_of(model):
        weight = part.get_base_layer().weight
        assert {weight.device, *(tensor.device for _, tensor in plain("", weight))} == {there}
    assert torch.equal(ao.run(model, there), with_lora)
    assert_same(bits(model), before)
    model.to("cpu")
    assert_same(bits(model), before)


def test_two_adapters_one_after_the_other(gpu):
    """The second is added to the first; only when both are out the weight is the first one's again."""
    import torch

    here = gpu.devices[0]
    model = ao.adapted("int8", here, ("one", "two"))
    both, before = ao.run(model, here), bits(model)
    model.merge_adapter(["one"])
    first = [vars(part)[KEPT][0] for part in kept(model)]
    model.merge_adapter(["two"])
    assert all(
        vars(part)[KEPT][0][0][1][0] is one[0][1][0] for part, one in zip(kept(model), first, strict=True)
    )
    assert [part.merged_adapters for part in layers_of(model)] == [["one", "two"]] * 2
    model.unmerge_adapter()
    assert_same(bits(model), before)
    assert torch.equal(ao.run(model, here), both)


def test_of_one_layer_only(gpu):
    import torch

    here = gpu.devices[0]
    model = ao.adapted("int8", here)
    with_lora, before = ao.run(model, here), bits(model)
    model.merge_adapter()
    first, second = layers_of(model)
    first.unmerge()
    assert kept(model) == [second]
    second.unmerge()
    assert_same(bits(model), before)
    assert torch.equal(ao.run(model, here), with_lora)


def test_disabled_and_enabled_again(gpu):
    """A run with the adapters disabled takes them out first."""
    import torch

    here = gpu.devices[0]
    model = ao.adapted("int8", here)
    with_lora, before = ao.run(model, here), bits(model)
    with model.disable_adapter():
        without = ao.run(model, here)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(ao.run(model, here), without)
    assert_same(bits(model), before)
    assert torch.equal(ao.run(model, here), with_lora)


@pytest.mark.parametrize("weights", ["int8", "float8"])
def test_a_merge_or_unmerge_that_fails_changes_nothing(gpu, monkeypatch, weights):
    import torch
    import torchao

    here = gpu.devices[0]
    model = ao.adapted(weights, here)
    with_lora, before = ao.run(model, here), bits(model)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    def fail(act):
        with monkeypatch.context() as patch:
            patch.setattr(torchao, "quantize_", interrupt)
            with pytest.raises(KeyboardInterrupt):
                act()

    fail(model.merge_adapter)
    assert not any(part.merged for part in layers_of(model)) and not kept(model)
    assert_same(bits(model), before)
    assert torch.equal(ao.run(model, here), with_lora)
    model.merge_adapter()
    merged, fused = ao.run(model, here), bits(model)
    fail(model.unmerge_adapter)
    assert all(part.merged for part in layers_of(model))
    assert_same(bits(model), fused)
    assert torch.equal(ao.run(model, here), merged)
    model.unmerge_adapter()
    assert_same(bits(model), before)


def test_nothing_is_kept_of_what_is_unloaded(gpu):
    model = ao.adapted("int8", gpu.devices[0])
    model.merge_adapter()
    copies = [weakref.ref(vars(part)[KEPT][0][0][1][0]) for part in kept(model)]
    assert len(copies) == 2 and all(one().device.type == "cpu" for one in copies)
    plain = model.merge_and_unload()
    del model
    gc.collect()
    assert not any(one() is not None for one in copies)
    assert not kept(plain)


def test_other_values_in_between_stay(gpu):
    """Weights that were exchanged while a LoRA was merged: it is taken out of these, as upstream does."""
    import torch

    here = gpu.devices[0]
    model = ao.adapted("int8", here)
    before = bits(model)
    model.merge_adapter()
    weight = layers_of(model)[0].get_base_layer().weight
    scale = next(tensor for _, tensor in plain("", weight) if tensor.is_floating_point())
    with torch.no_grad():
        scale.mul_(2)
    model.unmerge_adapter()
    now = bits(model)
    assert any(not torch.equal(now[name], before[name]) for name in now if ".0." in name)
    assert_same(*({name: one for name, one in found.items() if ".1." in name} for found in (now, before)))
    assert not kept(model)


def test_a_deleted_adapter_stays_merged(gpu):
    model = ao.adapted("int8", gpu.devices[0])
    model.merge_adapter()
    for part in layers_of(model):
        part.delete_adapter("one")
    assert not kept(model)


def test_without_memory_it_is_as_upstream_has_it(gpu, monkeypatch, tmp_path, caplog):
    here = gpu.devices[0]
    model = ao.adapted("float8", here)
    with_lora = ao.run(model, here)
    with without_memory(monkeypatch, tmp_path, caplog):
        model.merge_adapter()
    assert not kept(model)
    model.unmerge_adapter()
    assert 0 < lora.distance(ao.run(model, here), with_lora) < 0.2 * with_lora.abs().max()


@formats
def test_a_merged_model_is_copied_and_saved(gpu, weights):
    import torch

    here = gpu.devices[0]
    model = ao.adapted(weights, here)
    before, names = bits(model), set(model.state_dict())
    model.merge_adapter()
    assert names == set(model.state_dict())
    merged = ao.run(model, here)
    again = [copy.deepcopy(model)]
    # Before, torchao's models cannot be pickled, in this format before 0.17.
    if not unmet("torchao>=0.17" if weights == "int4" else "torchao>=0.15"):
        again.append(mapped.reloaded(model, None))
    for one in again:
        assert torch.equal(ao.run(one, here), merged)
        one.unmerge_adapter()
        assert_same(bits(one), before)
    assert len(kept(model)) == 2


def test_in_inference_mode():
    """On the CPU: torchao's weights cannot be moved in it. Training after it works as before."""
    import torch

    model = ao.adapted("int8")
    before = bits(model)
    with torch.inference_mode():
        model.merge_adapter()
        ao.run(model)
        model.unmerge_adapter()
    assert_same(bits(model), before)
    model.train()(torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert all(part.lora_A["one"].weight.grad is not None for part in layers_of(model))


@pytest.mark.skipif(
    bool(unmet("diffusers>=0.42")), reason="TorchAoConfig takes a config of torchao in newer releases"
)
@pytest.mark.parametrize(
    ("offload", "weights"),
    rest_is_long(product(OFFLOADS, ["int8", "float8"]), *in_turn(OFFLOADS, ["int8", "float8"])),
)
def test_a_pipeline(gpu, tmp_path, offload, weights):
    """``fuse_lora`` and ``unfuse_lora`` of two LoRAs, under each offload."""
    import torch
    from diffusers import FluxTransformer2DModel, TorchAoConfig

    if weights == "float8" and unmet("peft>=0.19"):
        pytest.skip("this peft does not know these weights")
    models.saved(models.flux_transformer(), tmp_path)
    transformer = FluxTransformer2DModel.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(ao.config(weights)), torch_dtype=torch.bfloat16
    )
    pipe = lora.load(models.flux_pipeline(transformer))
    lora.assert_taken_out_exactly(pipe, offload, torch.device(gpu.devices[0]), torch.bfloat16, False)
