"""peft-unmerge-other-adapters: what is no LoRA, taken out of quantized weights, leaves the bits that there were."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import four_bit, packed_layers
from tests.fixes.lora_models import distance
from tests.fixes.merged import KEPT, OFFLOADS, assert_same, bits, keep_compiler, kept, layers_of
from tests.fixes.test_peft_merge_other_adapters import bnb_layers
from tests.gate import unmet
from tests.marks import rest_is_long
from tests.rig import models

FIX_ID = "peft-unmerge-other-adapters"
peft = pytest.importorskip("peft", reason="peft is not installed")
SHOWS = "not what it was"
NEEDS = ("bitsandbytes>=0.46", "peft>=0.21")
KINDS = {
    "VeRA": ("Vera", {"r": 8, "d_initial": 1.0, "init_weights": False}),
    "OFT": ("OFT", {"r": 0, "oft_block_size": 16, "init_weights": False}),
    "OFT, Cayley-Neumann": (
        "OFT",
        {"r": 0, "oft_block_size": 16, "init_weights": False, "use_cayley_neumann": True},
    ),
    "BOFT": ("BOFT", {"boft_block_size": 8, "init_weights": False}),
    "MiSS": ("Miss", {"r": 8, "init_weights": False}),
    "SHiRA": ("Shira", {"r": 4, "init_weights": False}),
}
# Of the fixes ``peft-unmerge-road``, ``-hira`` and ``-pvera``
OTHER_KINDS = {
    "RoAd": ("Road", {"variant": "road_4", "group_size": 8, "init_weights": False}),
    "HiRA": ("Hira", {"r": 8, "init_weights": False}),
    "PVeRA": ("Pvera", {"r": 8, "d_initial": 1.0, "init_weights": False}),
}
# Added to a model of diffusers. Upstream itself adds no VeRA and PVeRA there, cannot take a RoAd in half precision out
# of 8-bit weights, and SHiRA needs sparse tensors, which the rig does not have.
IN_A_PIPELINE = ("OFT", "OFT, Cayley-Neumann", "BOFT", "MiSS", "RoAd", "HiRA")
# Their weights stand in a ParameterDict, which a hook for each module with weights never brings; plain models fail too.
OF_WHOLE_MODELS = ("BOFT", "HiRA")
pytestmark = pytest.mark.skipif(
    bool(unmet("peft>=0.21")), reason="before peft 0.21 some of these kinds have other classes"
)
kinds = pytest.mark.parametrize("kind", KINDS)
weights = pytest.mark.parametrize("weights", ["nf4", "int8"])


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    keep_compiler(monkeypatch)


def config_of(kind: str, targets=("0", "1")):
    name, options = (KINDS | OTHER_KINDS)[kind]
    return getattr(peft, f"{name}Config")(target_modules=list(targets), **options)


def adapted(model, kind: str, names=("one",)):
    """``model`` with adapters that matter."""
    import torch

    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    torch.manual_seed(1)
    result = peft.get_peft_model(model, config_of(kind), adapter_name=names[0])
    for name in names[1:]:
        result.add_adapter(name, config_of(kind))
    enlarge(result)
    if len(names) > 1:
        result.base_model.set_adapter(list(names))
    return result.eval()


def enlarge(model) -> None:
    import torch

    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                more = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.add_(more.to(parameter.device))


def torchao_layers():
    import torch

    model = torch.nn.Sequential(*(packed_layers.torchao_linear("cpu", seed) for seed in (0, 1)))
    from torchao.quantization import Int8WeightOnlyConfig

    class Config:
        @staticmethod
        def get_apply_tensor_subclass():
            return Int8WeightOnlyConfig()

    class Quantizer:
        quantization_config = Config

    model.hf_quantizer = Quantizer
    return model.requires_grad_(False)


def run(model, device="cpu"):
    import torch

    features = next(layer.in_features for layer in model.modules() if hasattr(layer, "in_features"))
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 2 * features, device=device).view(2, features)).cpu()


def assert_taken_out_exactly(model, device="cpu") -> None:
    import torch

    with_adapter, before = run(model, device), bits(model)
    for _ in range(2):
        model.merge_adapter()
        assert all(layer.merged for layer in layers_of(model))
        assert not torch.equal(run(model, device), with_adapter)
        model.unmerge_adapter()
        assert_same(bits(model), before)
        assert torch.equal(run(model, device), with_adapter), "the output is not what it was"
        assert not kept(model)


def interrupted(monkeypatch, weights: str, act) -> None:
    """``act``, interrupted where it quantizes."""
    import bitsandbytes

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bitsandbytes.nn, "Int8Params" if weights == "int8" else "Params4bit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            act()


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
@weights
@kinds
def test_weights_of_bitsandbytes(weights, kind):
    assert_taken_out_exactly(adapted(bnb_layers(weights), kind))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("torchao>=0.18", "peft>=0.21"))
@kinds
def test_weights_of_torchao(kind):
    if kind == "SHiRA":
        pytest.skip("its mask needs an operation that these weights do not have")
    assert_taken_out_exactly(adapted(torchao_layers(), kind))


@weights
@kinds
def test_several_adapters(weights, kind):
    """Merged one after the other; ``unmerge`` takes the last one out first."""
    import torch

    model = adapted(bnb_layers(weights), kind, ("one", "two"))
    both, before = run(model), bits(model)
    for name in ("one", "two"):
        model.merge_adapter([name])
    assert all(layer.merged_adapters == ["one", "two"] for layer in layers_of(model))
    model.unmerge_adapter()
    assert_same(bits(model), before)
    assert torch.equal(run(model), both)
    model.merge_adapter()
    model.unmerge_adapter()
    assert_same(bits(model), before)


@weights
def test_on_devices_and_moved_between(gpu, weights):
    import torch

    here, there = gpu.two
    model = adapted(bnb_layers(weights).to(here), "VeRA").to(here)
    assert_taken_out_exactly(model, here)
    before, expected = bits(model), run(model, here)
    model.merge_adapter()
    model.to(there)
    run(model, there)
    model.unmerge_adapter()
    assert all(layer.get_base_layer().weight.device == there for layer in layers_of(model))
    assert_same(bits(model), before)
    assert torch.equal(run(model, there), expected)


@weights
def test_what_fails_changes_nothing(monkeypatch, weights):
    import torch

    model = adapted(bnb_layers(weights), "OFT")
    expected, before = run(model), bits(model)

    interrupted(monkeypatch, weights, model.merge_adapter)
    assert not any(layer.merged for layer in layers_of(model)) and not kept(model)
    assert_same(bits(model), before)
    assert torch.equal(run(model), expected)
    model.merge_adapter()
    merged = run(model)
    interrupted(monkeypatch, weights, model.unmerge_adapter)
    assert all(layer.merged for layer in layers_of(model))
    assert torch.equal(run(model), merged)
    model.unmerge_adapter()
    assert_same(bits(model), before)


@weights
def test_copied_pickled_and_unloaded(weights):
    import torch

    model = adapted(bnb_layers(weights), "MiSS")
    names, before = set(model.state_dict()), bits(model)
    model.merge_adapter()
    assert names == set(model.state_dict())
    assert all(vars(layer)[KEPT][0][0][0].device.type == "cpu" for layer in kept(model))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(again), run(model))
        again.unmerge_adapter()
        assert_same(bits(again), before)
    plain = model.merge_and_unload()
    assert not kept(plain) and isinstance(plain, torch.nn.Sequential)


def test_a_deleted_adapter_stays_merged():
    model = adapted(bnb_layers("nf4"), "VeRA", ("one", "two"))
    model.merge_adapter()
    for layer in layers_of(model):
        layer.delete_adapter("one")
    assert not kept(model)


@kinds
def test_plain_layers_are_left_to_upstream(kind):
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
    model = adapted(layers, kind)
    expected = run(model)
    model.merge_adapter()
    assert not kept(model)
    assert torch.allclose(run(model), expected, atol=1e-4)
    model.unmerge_adapter()
    assert torch.allclose(run(model), expected, atol=1e-4)


@pytest.mark.parametrize("kind", rest_is_long(IN_A_PIPELINE, "OFT"))
@weights
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_pipeline(gpu, tmp_path, offload, weights, kind):
    """An adapter that was added to the transformer, fused and unfused by diffusers under each offload."""
    import torch
    from diffusers import FluxTransformer2DModel

    if sentence := unmet("diffusers>=0.35") or unmet("bitsandbytes>=0.46"):
        pytest.skip(f"group offload, and quantizing on the CPU: {sentence}")
    if kind in OF_WHOLE_MODELS and offload not in ("none", "model"):
        pytest.skip("not with hooks for each module with weights")
    if (kind, weights) == ("RoAd", "int8"):
        pytest.skip("upstream's own unmerge fails in half precision")
    here = torch.device(gpu.devices[0])
    models.saved(models.flux_transformer(), tmp_path)
    options = {"bits": 8} if weights == "int8" else {"bits": 4}
    pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, **options))
    torch.manual_seed(1)
    pipe.transformer.add_adapter(config_of(kind, ("to_q", "to_k", "to_v")))
    enlarge(pipe.transformer)
    OFFLOADS[offload](pipe, here)

    def output():
        return models.call_flux(pipe, here, torch.float16).cpu()

    expected = output()
    for _ in range(2):
        pipe.transformer.fuse_lora()
        assert distance(output(), expected) > 0
        assert kept(pipe.transformer)
        pipe.transformer.unfuse_lora()
        assert torch.equal(output(), expected), "the output is not what it was"
        assert not kept(pipe.transformer)


@pytest.mark.parametrize("merges", [True, False])
def test_a_layer_without_a_weight_is_left_to_upstream(merges):
    """Those of HQQ, where merging puts a new layer, and those of GPTQ, which cannot merge."""
    import torch
    from peft.utils.quantization_utils import ForwardOnlyQuantizationBackend, QuantizationBackend

    class Packed(torch.nn.Module):
        def __init__(self, numbers) -> None:
            super().__init__()
            self.numbers = numbers
            self.in_features = self.out_features = 64

        def forward(self, features):
            return features @ self.numbers.T

    class Backend(QuantizationBackend):
        supports_merge = True

        def get_base_weight(self, base_layer):
            return base_layer.numbers.clone()

        def set_base_weight(self, peft_layer, weight_data):
            peft_layer.base_layer = Packed(weight_data)

    model = adapted(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), "VeRA")
    for layer in layers_of(model):
        layer.base_layer = Packed(layer.base_layer.weight.detach())
        layer.quantization_backend = Backend() if merges else ForwardOnlyQuantizationBackend("gptq")
    expected = run(model)
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()
    if not merges:
        for layer in layers_of(model):
            with pytest.raises(TypeError, match="not supported for gptq"):
                layer.merge()
        return
    model.merge_adapter()
    assert torch.allclose(run(model), expected, atol=1e-4)
    model.unmerge_adapter()
    assert torch.allclose(run(model), expected, atol=1e-4)
