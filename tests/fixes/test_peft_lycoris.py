"""LoKr and LoHa on quantized layers: peft-lokr-packed-weight, peft-loha-packed-weight, peft-8bit-empty-adapter,
peft-merge-lycoris-quanto."""

from __future__ import annotations

import contextlib

import pytest

from tests.fixes import four_bit
from tests.fixes import quanto_models as q
from tests.fixes.packed_layers import eight_bit_linear, gguf_linear

pytest.importorskip("peft", reason="peft is not installed")
LAYERS = {"4-bit": four_bit.linear, "8-bit": eight_bit_linear, "gguf": gguf_linear}


def config(kind: str, **options):
    import peft

    return getattr(peft, f"{kind}Config")(r=8, alpha=8, target_modules=["0"], init_weights=False, **options)


def adapted(kind: str, layer):
    """``layer`` with an adapter of ``kind``, which is the same for every layer of a size."""
    import torch
    from peft import inject_adapter_in_model

    model = inject_adapter_in_model(config(kind), torch.nn.Sequential(layer).requires_grad_(False)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kind.lower() in name or "hada" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


PACKED = {
    "LoKr": pytest.mark.defect("peft-lokr-packed-weight", shows=r"shape '\[\d+, \d+\]' is invalid"),
    "LoHa": pytest.mark.defect("peft-loha-packed-weight", shows="mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *(
            pytest.param(kind, backend, marks=mark)
            for kind, mark in PACKED.items()
            for backend in ("4-bit", "gguf")
        ),
        *((kind, "8-bit") for kind in PACKED),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_its_product_has_the_shape_of_the_layer(gpu, kind, backend, dropout):
    """What it adds to the output is what it adds to that of a plain layer."""
    import torch

    here = gpu.devices[0]
    layer = LAYERS[backend](here)
    features = layer.in_features
    plain = adapted(kind, torch.nn.Linear(features, layer.out_features, device=here))
    inputs = torch.randn(3, features, generator=torch.Generator().manual_seed(2)).to(here)
    with torch.no_grad():
        without = layer(inputs)
        model = adapted(kind, layer)
        expected = plain[0].get_delta_weight("default")
        added = model(inputs) - without
    assert torch.equal(model[0].get_delta_weight("default"), expected)
    assert added.abs().max() > 0.01
    assert (added - inputs @ expected.T).abs().max() < 1e-2
    model[0].rank_dropout["default"] = dropout
    trained = model.train()(inputs).sum()
    trained.backward()
    gradients = [one.grad for one in model.parameters() if one.requires_grad]
    assert gradients and all(torch.isfinite(one).all() for one in gradients)


@pytest.mark.defect("peft-8bit-empty-adapter", shows="Cannot copy out of meta tensor", needs="peft>=0.18")
@pytest.mark.parametrize("kind", PACKED)
def test_without_memory_at_first(gpu, kind):
    import torch
    from peft import inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils import get_peft_model_state_dict

    here = gpu.devices[0]
    whole = adapted(kind, eight_bit_linear(here))
    weights = get_peft_model_state_dict(whole)
    model = torch.nn.Sequential(eight_bit_linear(here)).requires_grad_(False)
    empty = inject_adapter_in_model(config(kind), model, low_cpu_mem_usage=True)
    set_peft_model_state_dict(empty, weights, low_cpu_mem_usage=True)
    inputs = torch.randn(3, model[0].in_features, device=here)
    with torch.no_grad():
        assert torch.equal(empty.eval()(inputs), whole(inputs))


@pytest.mark.defect("peft-merge-lycoris-quanto", shows="as without the adapter")
@pytest.mark.parametrize("qtype", ["qint8", "qfloat8"])
@pytest.mark.parametrize("kind", PACKED)
def test_merged_into_quanto(kind, qtype):
    import torch

    model = adapted(kind, q.layers(qtype)[0])
    adapter = model[0]

    def run(disabled=False):
        adapter.enable_adapters(not disabled)
        with torch.no_grad():
            output = model(q.inputs())
        adapter.enable_adapters(True)
        return output

    before, with_adapter = run(disabled=True), run()
    packed = {name: tensor.clone() for name, tensor in adapter.base_layer.state_dict().items()}
    for safe in (False, True):
        adapter.merge(safe_merge=safe)
        merged = run()
        assert not torch.equal(merged, before), "as without the adapter"
        assert q.error(merged, with_adapter) < 0.1
        with contextlib.suppress(Exception):
            adapter.merge()  # "already merged": nothing happens
        assert torch.equal(run(), merged)
        adapter.unmerge()
        assert torch.equal(run(), with_adapter)
        for name, now in adapter.base_layer.state_dict().items():  # torch 2.5 compares no float8
            assert torch.equal(now.float(), packed[name].float())
