"""peft-merge-torchao: DoRAs, and several LoRAs at once, merged into weights of torchao."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models as lora
from tests.fixes import torchao_models as ao
from tests.fixes.merged import assert_same, bits, layers_of
from tests.gate import unmet

FIX_ID = "peft-merge-torchao"
pytestmark = pytest.mark.skipif(
    bool(unmet("peft>=0.14") or unmet("torchao")), reason="needs torchao, and peft 0.14, which knows it first"
)
ROUNDING = 0.06  # of the greatest output; of float8
formats = pytest.mark.parametrize("weights", ao.WEIGHTS)


def check(model, device, acts=None) -> None:
    """Merged it gives what it gave before, and unmerged it is what it was."""
    import torch

    with_lora, before = ao.run(model, device), bits(model)
    for act in acts or [model.merge_adapter]:
        act()
    off = lora.distance(ao.run(model, device), with_lora)
    assert 0 < off < ROUNDING * with_lora.abs().max(), f"merged it is off by {off:.3g}"
    model.unmerge_adapter()
    assert not any(part.merged for part in layers_of(model))
    assert torch.equal(ao.run(model, device), with_lora)
    assert_same(bits(model), before)


@pytest.mark.defect(FIX_ID, shows="merged it is off by", needs="torchao")
@formats
def test_dora(gpu, weights):
    here = gpu.devices[0]
    check(ao.adapted(weights, here, use_dora=True), here)


@pytest.mark.defect(FIX_ID, shows="local variable 'weight'", needs="torchao")
@formats
def test_two_at_once(gpu, weights):
    here = gpu.devices[0]
    check(ao.adapted(weights, here, ("one", "two")), here)


@pytest.mark.defect(FIX_ID, shows="KeyError: 'one'", needs="torchao")
def test_a_lora_that_is_not_on_every_layer(gpu):
    here = gpu.devices[0]
    model = ao.adapted("int8", here, ("one", "two"), (["0"], ["0", "1"]))
    check(model, here, [lambda: model.merge_adapter(["one"]), lambda: model.merge_adapter(["two"])])


def test_each_way_to_say_it(gpu):
    """By the layer itself, named, and one after the other; what is merged already is not merged again."""
    here = gpu.devices[0]
    model = ao.adapted("int8", here, ("one", "two"))

    def named():
        for part in layers_of(model):
            part.merge(True, adapter_names=["two", "one"])

    check(model, here, [named])
    check(model, here, [lambda: model.merge_adapter(["one"]), model.merge_adapter, model.merge_adapter])


def test_a_name_and_none(gpu):
    """What upstream refuses is refused; what asks for nothing changes nothing."""
    model = ao.adapted("int8", gpu.devices[0], ("one", "two"))
    before = bits(model)
    for part in layers_of(model):
        with pytest.raises((TypeError, ValueError), match="adapter_names should be a list of strings"):
            part.merge(adapter_names="one")
        part.merge(adapter_names=[])
    assert_same(bits(model), before)


def test_without_the_config_it_is_refused(gpu):
    model = ao.adapted("int8", gpu.devices[0], ("one", "two"))
    before = bits(model)
    for part in layers_of(model):
        part.get_apply_tensor_subclass = None
        with pytest.raises((TypeError, ValueError)):
            part.merge()
        assert not part.merged
    assert_same(bits(model), before)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_merge_that_fails_changes_nothing(gpu, monkeypatch, options):
    import torch
    import torchao

    here = gpu.devices[0]
    model = ao.adapted("int8", here, ("one",) if options else ("one", "two"), **options)
    with_lora, before = ao.run(model, here), bits(model)
    good = [part.lora_B["one"].weight.detach().clone() for part in layers_of(model)]
    with torch.no_grad():
        for part in layers_of(model):
            part.lora_B["one"].weight.fill_(float("nan"))
    for part in layers_of(model):
        with pytest.raises(ValueError, match="NaNs detected"):
            part.merge(safe_merge=True)
        assert not part.merged
    assert_same(bits(model), before)
    with torch.no_grad():
        for part, weight in zip(layers_of(model), good, strict=True):
            part.lora_B["one"].weight.copy_(weight)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torchao, "quantize_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.merge_adapter()
    assert not any(part.merged for part in layers_of(model))
    assert_same(bits(model), before)
    assert torch.equal(ao.run(model, here), with_lora)


def test_merged_for_good(gpu):
    import torch

    here = gpu.devices[0]
    model = ao.adapted("int8", here, ("one", "two"))
    with_lora = ao.run(model, here)
    plain = model.merge_and_unload()
    kinds = {type(part.weight) for part in plain}
    assert len(kinds) == 1 and kinds.pop() is not torch.nn.Parameter
    assert lora.distance(ao.run(plain, here), with_lora) < ROUNDING * with_lora.abs().max()
