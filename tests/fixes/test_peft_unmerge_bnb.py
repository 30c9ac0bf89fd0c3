"""peft-unmerge-bnb: a LoRA taken out of 4-bit and 8-bit weights leaves the bits that there were."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import weakref
from itertools import product

import pytest

from tests.fixes import four_bit
from tests.fixes import lora_models as lora
from tests.fixes.callers import stopped_at_each_line
from tests.fixes.merged import KEPT, OFFLOADS, assert_same, bits, kept, layers_of, without_memory
from tests.gate import unmet
from tests.marks import in_turn, rest_is_long
from tests.rig import models

FIX_ID = "peft-unmerge-bnb"
pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "not what it was"
NOT_ON_A_CPU = "bitsandbytes quantizes on a CPU from 0.46 on"
FORMATS = ("nf4", "nf4-double", "nf4-float32", "int8")
formats = pytest.mark.parametrize("weights", FORMATS)


def adapted(weights: str, device, names=("one",), **options):
    """Two quantized layers on ``device`` with LoRAs that are large enough to matter."""
    import torch
    from peft import LoraConfig, get_peft_model

    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layers = [layer(bnb, weights) for _ in range(2)]
    for part in layers:
        part.bias.data = part.bias.data.half()  # as the first run would have it
    model = torch.nn.Sequential(*layers).to(device).requires_grad_(False)
    model.is_loaded_in_8bit = weights == "int8"
    model.is_loaded_in_4bit = weights != "int8"
    if weights == "int8":
        skip_where_peft_knows_no_8bit_layers()
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["0", "1"], **options)
    peft = get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        peft.add_adapter(name, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return peft.eval().to(device)


def skip_where_peft_knows_no_8bit_layers() -> None:
    if unmet("peft>=0.14") and not unmet("bitsandbytes>=0.45"):
        pytest.skip("peft before 0.14 asks 8-bit layers for what bitsandbytes has no more from 0.45 on")


def layer(bnb, weights: str):
    import torch

    size = four_bit.FEATURES
    if weights == "int8":
        return bnb.nn.Linear8bitLt(size, size, has_fp16_weights=False)
    storage = torch.float32 if weights == "nf4-float32" else torch.uint8
    return bnb.nn.Linear4bit(
        size,
        size,
        compute_dtype=torch.float16,
        compress_statistics=weights == "nf4-double",
        quant_type="nf4",
        quant_storage=storage,
    )


def run(model, device):
    import torch

    generator = torch.Generator().manual_seed(7)
    given = torch.randn(3, four_bit.FEATURES, generator=generator).to(device, torch.float16)
    with torch.no_grad():
        return model(given).cpu()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@formats
def test_merged_and_taken_out_again(gpu, weights):
    """Twice; the packed bytes and the output are what they were."""
    import torch

    here = gpu.devices[0]
    model = adapted(weights, here)
    with_lora = run(model, here)
    before = bits(model)
    for _ in range(2):
        model.merge_adapter()
        run(model, here)
        model.unmerge_adapter()
        assert_same(bits(model), before)
        assert torch.equal(run(model, here), with_lora), "the output is not what it was"
        assert not kept(model)


@formats
def test_before_the_first_run(gpu, weights):
    """An 8-bit layer then has its scales in the weight."""
    import torch

    here = gpu.devices[0]
    model = adapted(weights, here)
    before = bits(model)
    with_lora = run(adapted(weights, here), here)
    model.merge_adapter()
    assert lora.distance(run(copy.deepcopy(model), here), with_lora) < 0.5 * with_lora.abs().max()
    model.unmerge_adapter()
    assert_same(bits(model), before)
    assert torch.equal(run(model, here), with_lora)


@formats
def test_moved_between(gpu, weights):
    """The bits come to where the weight is now."""
    import torch

    here, there = gpu.two
    model = adapted(weights, here)
    with_lora, before = run(model, here), bits(model)
    model.merge_adapter()
    run(model, here)
    model.to(there)
    run(model, there)
    model.unmerge_adapter()
    for part in layers_of(model):
        assert part.get_base_layer().weight.device == there
    assert torch.equal(run(model, there), with_lora)
    assert_same(bits(model), before)


@pytest.mark.skipif(bool(unmet("bitsandbytes>=0.46")), reason=NOT_ON_A_CPU)
@pytest.mark.skipif(
    bool(unmet("peft>=0.15")), reason="older peft asks for a CUDA device when it merges on the CPU"
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@formats
def test_on_the_cpu(weights):
    """Where 4-bit weights may be repacked at the first run."""
    import torch

    if weights == "nf4-float32" and (sentence := unmet("bitsandbytes>=0.47")):
        pytest.skip(f"the CPU reads 4-bit weights in bytes only before; {sentence}")
    model = adapted(weights, torch.device("cpu"))
    before = bits(copy.deepcopy(model))
    with_lora = run(model, "cpu")
    for _ in range(2):
        model.merge_adapter()
        run(model, "cpu")
        model.unmerge_adapter()
        assert_same(bits(copy.deepcopy(model)), before)
        assert torch.equal(run(model, "cpu"), with_lora)


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_dora_and_two_adapters(gpu, weights):
    import torch

    here = gpu.devices[0]
    # Before 0.12 peft loses the first of two DoRAs.
    for options in ({}, {"use_dora": True})[: 1 if unmet("peft>=0.12") else 2]:
        model = adapted(weights, here, ("one", "two"), **options)
        model.base_model.set_adapter(["one"] if options else ["one", "two"])
        with_lora, before = run(model, here), bits(model)
        for name in model.base_model.active_adapters:
            model.merge_adapter([name])
        model.unmerge_adapter()
        assert_same(bits(model), before)
        assert torch.equal(run(model, here), with_lora)


@pytest.mark.skipif(bool(unmet("peft>=0.14")), reason="lora_bias came with peft 0.14")
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_a_bias_of_the_adapter(gpu, weights):
    here = gpu.devices[0]
    model = adapted(weights, here, lora_bias=True)
    before = bits(model)
    model.merge_adapter()
    run(model, here)
    model.unmerge_adapter()
    assert_same(bits(model), before)
    model.merge_adapter()
    for part in layers_of(model):
        part.get_base_layer().bias.data += 1  # by someone else
    model.unmerge_adapter()
    now = bits(model)
    assert_same(
        *({key: one for key, one in found.items() if not key.endswith("bias")} for found in (now, before))
    )
    assert not any(now[key].equal(before[key]) for key in now if key.endswith("bias"))


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_a_merge_or_unmerge_that_fails_changes_nothing(gpu, monkeypatch, weights):
    import bitsandbytes
    import torch

    here = gpu.devices[0]
    model = adapted(weights, here)
    with_lora, before = run(model, here), bits(model)
    name = "Int8Params" if weights == "int8" else "Params4bit"

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    def fail(act):
        with monkeypatch.context() as patch:
            patch.setattr(bitsandbytes.nn, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                act()

    fail(model.merge_adapter)
    assert not any(part.merged for part in layers_of(model)) and not kept(model)
    assert_same(bits(model), before)
    assert torch.equal(run(model, here), with_lora)
    model.merge_adapter()
    merged, fused = run(model, here), bits(model)
    fail(model.unmerge_adapter)
    assert all(part.merged for part in layers_of(model))
    assert torch.equal(run(model, here), merged)
    assert_same(bits(model), fused)
    model.unmerge_adapter()
    assert_same(bits(model), before)


@pytest.mark.parametrize("weights", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_interrupted_where_a_failed_merge_is_undone(gpu, monkeypatch, weights):
    """Ctrl-C at any line of that: the layers are as before the merge."""
    import bitsandbytes
    import torch

    from diffusers_quantfix import finishing
    from diffusers_quantfix.adapters import before_merge

    here = gpu.devices[0]

    def prepare():
        model = adapted(weights, here)
        return model, run(model, here), bits(model)

    def fail(*args, **kwargs):
        raise MemoryError

    def merge(prepared):
        with monkeypatch.context() as patch, contextlib.suppress(MemoryError):
            patch.setattr(bitsandbytes.nn, "Int8Params" if weights == "int8" else "Params4bit", fail)
            prepared[0].merge_adapter()

    trials = 0
    for model, with_lora, before in stopped_at_each_line(prepare, merge, before_merge, finishing):
        trials += 1
        assert_same(bits(model), before)
        assert not any(part.merged for part in layers_of(model))
        assert torch.equal(run(model.to("cpu").to(here), here), with_lora)
    assert trials > 20


@pytest.mark.long
def test_interrupted_again_while_the_first_interruption_leaves_the_merge(gpu, monkeypatch):
    """Of a sequentially offloaded model: the hooks take the weights as they were before the merge."""
    import accelerate
    import bitsandbytes
    import torch

    from diffusers_quantfix import finishing
    from diffusers_quantfix.adapters import merging

    here = gpu.devices[0]

    def prepare():
        return accelerate.cpu_offload(adapted("nf4", here), here)

    def fail(*args, **kwargs):
        raise MemoryError

    expected = run(prepare(), here)

    def merge(model):
        with monkeypatch.context() as patch, contextlib.suppress(MemoryError):
            patch.setattr(bitsandbytes.nn, "Params4bit", fail)
            with merging.merges_reach_weights(model):
                model.merge_adapter()

    trials = 0
    for model in stopped_at_each_line(prepare, merge, finishing, contextlib):
        trials += 1
        assert torch.equal(run(model, here), expected)
    assert trials > 20


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_nothing_is_kept_of_what_is_unloaded(gpu, weights):
    import torch

    here = gpu.devices[0]
    model = adapted(weights, here)
    model.merge_adapter()
    copies = [weakref.ref(vars(part)[KEPT][0][0][0]) for part in kept(model)]
    assert len(copies) == 2 and all(one().device.type == "cpu" for one in copies)
    plain = model.merge_and_unload()
    del model
    gc.collect()
    assert not any(one() is not None for one in copies)
    assert not kept(plain) and isinstance(plain, torch.nn.Sequential)


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_other_values_in_between_stay(gpu, weights):
    """Weights that were exchanged while a LoRA was merged: it is taken out of these, as upstream does."""
    import torch

    here = gpu.devices[0]
    model, other = adapted(weights, here), adapted(weights, here)
    before = bits(model)
    model.merge_adapter()
    torch.manual_seed(3)
    first = layers_of(model)[0]
    with torch.no_grad():
        first.get_base_layer().weight.data.copy_(layers_of(other)[1].get_base_layer().weight.data)
    model.unmerge_adapter()
    now = bits(model)
    name = next(name for name in before if ".0." in name and name.endswith("base_layer.weight"))
    assert not torch.equal(now[name], before[name])
    assert_same({key: one for key, one in now.items() if ".1." in key},
                {key: one for key, one in before.items() if ".1." in key})  # fmt: skip
    assert not kept(model)


def test_a_deleted_adapter_stays_merged(gpu):
    here = gpu.devices[0]
    model = adapted("nf4", here)
    model.merge_adapter()
    for part in layers_of(model):
        part.delete_adapter("one")
    assert not kept(model)


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_without_memory_it_is_as_upstream_has_it(gpu, monkeypatch, tmp_path, caplog, weights):
    here = gpu.devices[0]
    model = adapted(weights, here)
    with_lora = run(model, here)
    with without_memory(monkeypatch, tmp_path, caplog):
        model.merge_adapter()
    assert not kept(model)
    model.unmerge_adapter()
    off = lora.distance(run(model, here), with_lora)
    assert 0 < off < 0.2 * with_lora.abs().max()


@pytest.mark.parametrize("weights", ["nf4-double", "int8"])
def test_a_merged_model_is_copied_and_pickled(gpu, weights):
    import torch

    here = gpu.devices[0]
    model = adapted(weights, here)
    before = bits(model)
    names = set(model.state_dict())
    model.merge_adapter()
    assert names == set(model.state_dict())
    merged = run(model, here)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(again, here), merged)
        again.unmerge_adapter()
        assert_same(bits(again), before)
    assert len(kept(model)) == 2


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_in_inference_mode(gpu, weights):
    import torch

    here = gpu.devices[0]
    model = adapted(weights, here)
    before = bits(model)
    with torch.inference_mode():
        model.merge_adapter()
    model.unmerge_adapter()
    assert_same(bits(model), before)


@pytest.mark.skipif(bool(unmet("bitsandbytes>=0.46")), reason=NOT_ON_A_CPU)
@pytest.mark.skipif(
    bool(unmet("peft>=0.15")), reason="older peft asks for a CUDA device when it merges on the CPU"
)
@pytest.mark.long
def test_a_compiled_model_unmerges_in_its_forward():
    """Of 4-bit layers the compiler of some releases of torch cannot trace the weights."""
    import torch

    model = adapted("int8", torch.device("cpu"))
    before, with_lora = bits(copy.deepcopy(model)), run(model, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    model.merge_adapter()
    run(compiled, "cpu")
    with model.disable_adapter():
        run(compiled, "cpu")
    assert_same(bits(copy.deepcopy(model)), before)
    assert torch.equal(run(compiled, "cpu"), with_lora)


OPTIONS = {
    "nf4": {"bits": 4},
    "nf4-double": {"bits": 4, "double_quant": True},
    "int8": {"bits": 8},
}


def moves_scales() -> bool:
    """Whether peft dequantizes an 8-bit weight whose scales are still on the device where it ran."""
    from peft.utils.integrations import dequantize_bnb_weight

    return "SCB.to(" in inspect.getsource(inspect.unwrap(dequantize_bnb_weight))


@pytest.mark.parametrize(
    ("offload", "weights"), rest_is_long(product(OFFLOADS, OPTIONS), *in_turn(OFFLOADS, OPTIONS))
)
def test_a_pipeline(side, gpu, tmp_path, offload, weights):
    """``fuse_lora`` and ``unfuse_lora``, as diffusers' documentation has them, under each offload."""
    import torch
    from diffusers import FluxTransformer2DModel

    if offload in ("leaf", "stream") and unmet("diffusers>=0.35"):
        pytest.skip("group offload and LoRA: from 0.35 on")
    if offload == "model" and unmet("bitsandbytes>=0.46"):
        pytest.skip(NOT_ON_A_CPU)
    if weights == "int8":
        skip_where_peft_knows_no_8bit_layers()
    if (
        (offload, weights) == ("model", "int8")
        and not moves_scales()
        and (side == "bare" or unmet("peft>=0.14"))
    ):
        pytest.skip("this peft cannot merge on the CPU once the layer has run on a device")
    options = OPTIONS[weights]
    lora.skip_where_flux_takes_no_lora(options["bits"])
    models.saved(models.flux_transformer(), tmp_path)
    pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, **options))
    lora.assert_taken_out_exactly(lora.load(pipe), offload, torch.device(gpu.devices[0]), torch.float16)
