"""Every backend, every placement, every action of ``actions.py``: the outputs are those of the same on one device.

What cannot work has its message here. After a refusal that this package makes, the pipeline runs as before.
"""

from __future__ import annotations

import gc
import re

import pytest

from tests.gate import unmet
from tests.rig import models
from tests.sweep.actions import ACTIONS, lora
from tests.sweep.backends import ALL_BACKENDS, in_turn
from tests.sweep.placements import PLACEMENTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="the sweep is about the newest releases"),
    pytest.mark.skipif(bool(unmet("peft")), reason="peft is not installed"),
]

ON_ONE_DEVICE = "to"
PLACED = [
    ON_ONE_DEVICE,
    "model offload",
    "sequential",
    "group, leaf",
    "group, leaf, stream",
    "group, block",
    "group, block, stream",
]
HOOKS_MOVE = "sequential|group.*"

# (backend, placement, action) as regular expressions -> the message with which this package refuses.
REFUSED: dict[tuple[str, str, str], str] = {
    ("gguf", ".*", "fuse|fuse for good|LoKr fused"): "cannot be merged into GGUF weights",
    ("(bnb|gguf|torchao).*", ".*", "fuse QKV"): "with packed or 8-bit weights cannot be fused",
    ("(?!plain).*", HOOKS_MOVE, "dequantize.*"): r"is offloaded, and dequantize\(\) would leave it broken",
}
# The same for errors of upstream's own.
FAILS: dict[tuple[str, str, str], str] = {
    ("plain", ".*", "dequantize.*"): "You need to first quantize your model",
    # hooks keep or move the weights that are concatenated; plain too
    ("plain|quanto.*", "sequential", "fuse QKV"): "Tensor on device meta is not on the expected device",
    ("plain|quanto.*", "group, leaf.*", "fuse QKV"): "Expected all tensors to be on the same device",
    # peft adds to the packed bytes, as to a plain weight; torch refuses, or we do
    (
        "(bnb|torchao).*",
        ".*",
        "LoKr fused",
    ): "be cast|size of tensor|output with shape|unimplemented|be merged",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


def expected_error(table, backend, placement, action) -> str:
    said = (backend, placement, action)
    found = (message for patterns, message in table.items() if all(map(re.fullmatch, patterns, said)))
    return next(found, "")


_references: dict = {}


def outputs(gpu, backend, placement, action, saved):
    """What an action gives, and the pipeline with a way to run it."""
    import torch

    here, dtype = gpu.devices[0], torch.bfloat16
    pipe = models.flux_pipeline(ALL_BACKENDS[backend](saved, dtype, None))
    device = PLACEMENTS[placement](pipe, here, gpu.devices[-1])

    def run(other=None):
        return models.call_flux(other or pipe, device=device, dtype=dtype).cpu()

    refused = expected_error(REFUSED, backend, placement, action)
    fails = expected_error(FAILS, backend, placement, action)
    if fails:
        with pytest.raises(Exception, match=fails):
            ACTIONS[action](pipe, run)
        return None
    if refused:
        before = run()
        with pytest.raises(ValueError, match=refused):
            ACTIONS[action](pipe, run)
        pipe.unload_lora_weights()
        assert torch.equal(run(), before), "it was changed before it was refused"
        return None
    return ACTIONS[action](pipe, run)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("backend", in_turn())
def test_action(gpu, backend, placement, action, saved):
    found = outputs(gpu, backend, placement, action, saved)
    gc.collect()
    if found is None:
        return
    key = (backend, action)
    if key not in _references:
        _references[key] = (
            found if placement == ON_ONE_DEVICE else outputs(gpu, backend, ON_ONE_DEVICE, action, saved)
        )
    # Which layer's output is rounded to float8's neighbours depends on the hooks that call it; plain too.
    allowed = 0.05 if action == "layerwise casting" else 0
    for one, other in zip(found, _references[key], strict=True):
        off = (one.float() - other.float()).abs().max().item()
        assert off <= allowed, f"off by {off}"


PLAIN_ROUNDING = 2**-8  # of bfloat16
TARGETS = (".to_q", ".to_k", ".to_v", ".to_out.0")


@pytest.mark.parametrize("backend", in_turn("gguf"))  # merging into GGUF is refused
def test_merging_costs_one_rounding(gpu, backend, saved):
    """The merged weight is the sum, off by no more than quantizing costs: the weights of the file are the measure.

    Taking out gives the same bits back with quanto and bitsandbytes; torchao rounds once more, as peft has it.
    """
    import torch
    from diffusers import FluxTransformer2DModel

    plain = FluxTransformer2DModel.from_pretrained(saved, torch_dtype=torch.float32)
    pipe = models.flux_pipeline(ALL_BACKENDS[backend](saved, torch.bfloat16, None)).to(gpu.devices[0])
    names = [name for name, _ in plain.named_modules() if name.endswith(TARGETS)]
    before = {name: dequantized(pipe.transformer.get_submodule(name)) for name in names}
    pipe.load_lora_weights(lora(1), adapter_name="one")
    layers = {name: pipe.transformer.get_submodule(name) for name in names}
    wanted = {name: before[name] + layers[name].get_delta_weight("one").float().cpu() for name in names}
    pipe.fuse_lora()
    merged = {name: dequantized(layers[name].get_base_layer()) for name in names}
    pipe.unfuse_lora()
    after = {name: dequantized(layers[name].get_base_layer()) for name in names}
    for name in names:
        rounding = max(relative(before[name], plain.get_submodule(name).weight.detach()), PLAIN_ROUNDING)
        assert relative(merged[name], before[name]) > PLAIN_ROUNDING, "merging has no effect"
        off = relative(merged[name], wanted[name])
        # A sum with greater extremes has greater steps.
        assert off <= 1.5 * rounding, (
            f"{name}: merged with an error of {off:.2g}, {rounding:.2g} is its rounding"
        )
        off = relative(after[name], before[name])
        allowed = 0 if backend.startswith(("quanto", "bnb")) else 2 * rounding
        assert off <= allowed, f"{name}: taken out with an error of {off:.2g}, {rounding:.2g} is its rounding"


def dequantized(layer):
    """The weight of a layer in float32 on the CPU."""
    from peft.utils.integrations import dequantize_bnb_weight

    weight = layer.weight.detach()
    if type(layer.weight).__name__ in ("Params4bit", "Int8Params"):
        weight = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None))
    elif hasattr(weight, "dequantize") and hasattr(weight, "__tensor_flatten__"):
        weight = weight.dequantize()
    return weight.float().cpu()


def relative(found, wanted) -> float:
    """The error of a whole matrix."""
    return float((found - wanted).norm() / wanted.norm())
