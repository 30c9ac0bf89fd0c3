"""peft-merge-quanto: merging a LoRA into weights of quanto, and taking it out again."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest

from tests.fixes import lora_models as lora
from tests.fixes import quanto_models as q
from tests.fixes.callers import assert_goes_on, stopped_at_each_line
from tests.gate import unmet
from tests.marks import in_turn, rest_is_long
from tests.rig import models

FIX_ID = "peft-merge-quanto"
pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "as without a LoRA"
# Of the greatest output: the rounding of the merged weight, which is quantized a second time.
ROUNDING = {"qint8": 0.04, "qfloat8": 0.08, "qint4": 0.4, "qint2": 1.5}


def adapted(qtype: str, dtype=None, **options):
    """Two quantized layers with a LoRA that is as large as they are, and its output."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = q.layers(qtype, dtype)
    names = [name for name, _ in model.named_modules() if name]
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=names, **options))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    return peft.eval()


def bits(model) -> dict:
    import torch

    return {
        name: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in model.state_dict().items()
        if "lora" not in name
    }


def same(one: dict, other: dict) -> bool:
    import torch

    data = [
        {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in state.items()}
        for state in (one, other)
    ]
    # As bytes: torch compares no float8 before 2.6.
    return one.keys() == other.keys() and all(torch.equal(data[0][name], data[1][name]) for name in one)


def check_merged(model, before, merge, unmerge, tolerance: float, dtype=None) -> None:
    """Merged it gives what it gave before, and not what it gives without the LoRA; unmerged it is what it was."""
    import torch

    weights = bits(model)
    with_lora = q.run(model, dtype)
    assert q.error(with_lora, before) > 0.1, "the LoRA is large enough to tell"
    merge()
    merged = q.run(model, dtype)
    assert not torch.equal(merged, before), SHOWS
    assert q.error(merged, with_lora) < tolerance
    unmerge()
    assert same(bits(model), weights)
    assert torch.equal(q.run(model, dtype), with_lora)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("qtype", q.QTYPES)
def test_merged_and_taken_out_again(qtype):
    model = adapted(qtype)
    with model.disable_adapter():
        before = q.run(model)
    check_merged(model, before, model.merge_adapter, model.unmerge_adapter, ROUNDING[qtype])
    check_merged(model, before, model.merge_adapter, model.unmerge_adapter, ROUNDING[qtype])


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_merged_for_good():
    """``merge_and_unload``: layers of quanto, quantized, that can be saved and loaded."""
    import torch

    model = adapted("qint8")
    with model.disable_adapter():
        before = q.run(model)
    with_lora = q.run(model)
    plain = model.merge_and_unload(safe_merge=True)
    merged = q.run(plain)
    assert not torch.equal(merged, before), SHOWS
    assert q.error(merged, with_lora) < ROUNDING["qint8"]
    assert type(plain[0]).__name__ == "QLinear" and plain[0].frozen
    library = q.quanto()
    again = q.plain_layers()
    library.requantize(again, copy.deepcopy(plain.state_dict()), library.quantization_map(plain))
    assert torch.equal(q.run(again), merged)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("safe", [False, True])
def test_as_it_is_said(safe, inference):
    """By the layers themselves: not every peft passes ``safe_merge`` on."""
    import torch

    with torch.inference_mode() if inference else torch.no_grad():
        model = adapted("qint8")
        with model.disable_adapter():
            before = q.run(model)

        def merge():
            for layer in model.base_model.model:
                layer.merge(safe, adapter_names=["default"])

        check_merged(model, before, merge, model.unmerge_adapter, ROUNDING["qint8"])


@pytest.mark.parametrize("qtype", ["qint8", "qint4"])
def test_a_model_made_before_inference_mode(qtype):
    """Merged, run without the adapter, which unmerges it, and unmerged in inference mode; used after it as before."""
    import torch

    model = adapted(qtype)
    weights, with_lora = bits(model), q.run(model)
    with model.disable_adapter():
        before = q.run(model)
    with torch.inference_mode():
        model.merge_adapter()
        assert not torch.equal(q.run(model), before), SHOWS
        with model.disable_adapter():
            assert torch.equal(q.run(model), before)
        model.merge_adapter()
    model.unmerge_adapter()
    assert same(bits(model), weights)
    assert torch.equal(q.run(model), with_lora)


@pytest.mark.long
def test_a_compiled_model_unmerges_in_its_forward():
    import torch

    model = adapted("qint8")
    with_lora = q.run(model)
    with model.disable_adapter():
        before = q.run(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    model.merge_adapter()
    assert q.error(q.run(compiled), with_lora) < ROUNDING["qint8"]
    with model.disable_adapter():
        assert torch.equal(q.run(compiled), before)
    assert torch.equal(q.run(compiled), with_lora)


def test_dora():
    model = adapted("qint8", use_dora=True)
    with model.disable_adapter():
        before = q.run(model)
    check_merged(model, before, model.merge_adapter, model.unmerge_adapter, ROUNDING["qint8"])


def test_two_adapters_one_after_the_other():
    """The second one is added to the first; only when both are out the weight is the first one's again."""
    import torch

    model = adapted("qint8")
    model.add_adapter("two", model.peft_config["default"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".two." in name:
                parameter.normal_(0, 0.05)
    weights = bits(model)
    model.base_model.set_adapter(["default", "two"])
    both = q.run(model)
    model.merge_adapter(["default"])
    model.merge_adapter(["two"])
    assert q.error(q.run(model), both) < 2 * ROUNDING["qint8"]
    model.unmerge_adapter()
    assert same(bits(model), weights)
    assert torch.equal(q.run(model), both)


def test_a_merge_that_fails_changes_nothing(monkeypatch):
    """With an adapter that is not finite, and interrupted while it quantizes anew."""
    import torch

    QLinear = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed").QLinear
    model = adapted("qint8")
    weights, with_lora = bits(model), q.run(model)
    layer = model.base_model.model[0]
    with torch.no_grad():
        good = layer.lora_B["default"].weight.clone()
        layer.lora_B["default"].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert not layer.merged
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(good)

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(QLinear, "freeze", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.merge_adapter()
    assert not layer.merged and same(bits(model), weights)
    assert torch.equal(q.run(model), with_lora)
    model.merge_adapter()
    assert layer.merged
    model.unmerge_adapter()
    assert same(bits(model), weights)


@pytest.mark.long
def test_an_unmerge_that_is_interrupted_at_each_line():
    """It is merged as before, or unmerged exactly; and so is the next one."""
    import torch

    from diffusers_quantfix import finishing
    from diffusers_quantfix.adapters import before_merge, merging_quanto

    weights = bits(adapted("qint8"))

    def prepare():
        model = adapted("qint8")
        model.merge_adapter()
        return model

    trials = 0
    for model in stopped_at_each_line(
        prepare, lambda model: model.unmerge_adapter(), merging_quanto, before_merge, finishing
    ):
        trials += 1
        assert torch.is_grad_enabled()
        model.unmerge_adapter()
        assert same(bits(model), weights)
    assert trials > 20


def test_a_merged_model_is_copied_and_pickled():
    import torch

    model = adapted("qint8")
    weights = bits(model)
    model.merge_adapter()
    merged = q.run(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(q.run(again), merged)
        again.unmerge_adapter()
        assert same(bits(again), weights)
    assert not [name for name, _ in model.named_parameters() if "quantfix" in name]
    assert not [name for name in model.state_dict() if "quantfix" in name]


def test_layers_of_others_and_weights_that_are_not_frozen():
    """A plain layer, and one whose weight quanto quantizes at each use."""
    import torch
    from peft import LoraConfig, get_peft_model

    for quantized in (False, True):
        layers = q.plain_layers()
        if quantized:
            q.quanto().quantize(layers, weights=q.quanto().qint8)
        model = get_peft_model(layers, LoraConfig(target_modules=["0"], init_lora_weights=False)).eval()
        with_lora = q.run(model)
        with model.disable_adapter():
            assert q.error(q.run(model), with_lora) > 0.05
        model.merge_adapter()
        assert q.error(q.run(model), with_lora) < ROUNDING["qint8"]
        assert isinstance(model.base_model.model[0].base_layer.weight, torch.nn.Parameter)
        assert type(model.base_model.model[0].base_layer.weight.data) is torch.Tensor


def with_adapter(transformer):
    """Put a LoRA in, as one does who trains; `load_lora_weights` needs another fix for Flux."""
    import torch
    from peft import LoraConfig

    targets = [name for name, _ in transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    transformer.add_adapter(LoraConfig(r=4, target_modules=targets), adapter_name="one")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return transformer


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("weights", ["int8", "float8", "int4"])
def test_fuse_lora_of_a_pipeline(tmp_path, weights):
    """As diffusers' documentation has it; then the LoRA is unloaded, and the result saved and loaded."""
    import diffusers
    import torch

    transformer = q.load_flux(q.saved_flux(tmp_path / "flux"), weights, torch.float32)
    pipe = models.flux_pipeline(transformer)
    before = lora.run(pipe)
    with_adapter(transformer)
    with_lora = lora.run(pipe)
    assert lora.distance(with_lora, before) > 0.05
    kept = bits(transformer)
    pipe.fuse_lora()
    fused = lora.run(pipe)
    assert not torch.equal(fused, before), SHOWS
    assert lora.distance(fused, with_lora) < lora.distance(fused, before)
    pipe.unfuse_lora()
    assert same(bits(transformer), kept)
    assert torch.equal(lora.run(pipe), with_lora)

    pipe.fuse_lora()
    pipe.unload_lora_weights()
    assert torch.equal(lora.run(pipe), fused)
    if weights != "int4":
        transformer.save_pretrained(tmp_path / "fused")
        again = diffusers.FluxTransformer2DModel.from_pretrained(
            tmp_path / "fused", torch_dtype=torch.float32
        )
        assert torch.equal(lora.run(models.flux_pipeline(again)), fused)


OFFLOADS = {
    "model": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "sequential": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "leaf": lambda pipe, device: pipe.transformer.enable_group_offload(device, offload_type="leaf_level"),
    "stream": lambda pipe, device: pipe.transformer.enable_group_offload(
        onload_device=device, offload_type="leaf_level", use_stream=True
    ),
    "block": lambda pipe, device: pipe.transformer.enable_group_offload(
        onload_device=device, offload_type="block_level", num_blocks_per_group=1
    ),
}


@pytest.mark.parametrize(
    ("offload", "weights"),
    rest_is_long(product(OFFLOADS, ["int8", "int4"]), *in_turn(OFFLOADS, ["int8", "int4"])),
)
def test_under_offload(gpu, tmp_path, offload, weights):
    """Fused and taken out again, exact to the bit, and the next run too."""
    import torch

    if offload in ("leaf", "stream", "block") and unmet("diffusers>=0.35"):
        pytest.skip("group offload and LoRA: from 0.35 on")
    saved = q.saved_flux(tmp_path / "flux")

    def pipeline():
        return models.flux_pipeline(with_adapter(q.load_flux(saved, weights, torch.float32)))

    device = torch.device("cuda")
    reference = pipeline()
    reference.to(device)
    with_lora = lora.run(reference, device)
    reference.fuse_lora()
    fused = lora.run(reference, device)
    assert lora.distance(fused, with_lora) > 0
    pipe = pipeline()
    OFFLOADS[offload](pipe, device)

    def check_fused(latents):
        assert torch.equal(latents, fused)

    for _ in range(2):
        assert torch.equal(lora.run(pipe, device), with_lora)
        pipe.fuse_lora()
        assert torch.equal(lora.run(pipe, device), fused)
        # At its end model offload moves all back with the hooks off.
        parts = (0.3, 0.5) if offload == "model" else (0.3, 0.8)
        # Plain layers of int4 cannot run in inference mode, offloaded or not.
        assert_goes_on(lambda: lora.run(pipe, device), check_fused, parts, weights != "int4")
        pipe.unfuse_lora()
    assert torch.equal(lora.run(pipe, device), with_lora)
