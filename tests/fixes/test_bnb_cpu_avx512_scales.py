"""bnb-cpu-avx512-scales: 4-bit weights of some widths are dequantized with the scales of other blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import diffusers_quantfix
from tests.fixes import four_bit
from tests.gate import unmet

torch = pytest.importorskip("torch")
functional = pytest.importorskip("bitsandbytes.functional")
if unmet("bitsandbytes>=0.49"):
    pytest.skip("before 0.49 bitsandbytes has no such kernel", allow_module_level=True)
if not hasattr(getattr(functional, "lib", None), "_lib"):
    pytest.skip("bitsandbytes has no native library here", allow_module_level=True)

FIX_ID = "bnb-cpu-avx512-scales"
SHOWS = "wrong scales"
# Narrower than a block, wider, and with a last block that is shorter.
SHAPES = [(64, 16), (64, 48), (64, 96), (32, 4304), (5, 80)]
kinds = pytest.mark.parametrize("kind", ["nf4", "fp4"])
nested = pytest.mark.parametrize("double", [False, True], ids=["", "double"])


def values(*shape, dtype=None):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype or torch.float32)


def by_hand(packed, state):
    """The weight that bytes and quant state stand for, in float32."""
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    packed = packed.flatten().view(torch.uint8)
    count = state.shape.numel()
    found = state.code.float()[torch.stack([packed >> 4, packed & 15], dim=1).flatten().int()][:count]
    return (found * scales.float().repeat_interleave(state.blocksize)[:count]).view(state.shape)


def check(found, expected):
    assert found.numel() == expected.numel()
    assert torch.allclose(found.float().view_as(expected), expected, rtol=0.01, atol=0.001), "wrong scales"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@nested
@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_block_has_its_own_scale(shape, kind, double, dtype):
    packed, state = functional.quantize_4bit(
        values(*shape, dtype=dtype), quant_type=kind, compress_statistics=double
    )
    check(functional.dequantize_4bit(packed, state), by_hand(packed, state))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("blocksize", [128, 256, 1024])
def test_other_block_sizes(blocksize):
    packed, state = functional.quantize_4bit(values(40, 192), quant_type="nf4", blocksize=blocksize)
    check(functional.dequantize_4bit(packed, state), by_hand(packed, state))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@nested
def test_a_layer_computes_with_its_weight_and_trains_with_it(double, storage):
    from bitsandbytes import nn

    layer = nn.Linear4bit(
        96, 64, bias=False, quant_type="nf4", compress_statistics=double, quant_storage=storage
    )
    layer.weight.data.copy_(values(64, 96))
    layer.to("cpu")
    weight = by_hand(layer.weight.data, layer.weight.quant_state)
    inputs = values(4, 96).requires_grad_()
    output = layer(inputs)
    check(output, inputs @ weight.t())
    output.sum().backward()
    check(inputs.grad, weight.sum(0).expand(4, 96))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_merged_lora(tmp_path):
    """The merge quantizes the sum of the weight and the delta; a delta of zeros leaves the weight as it is."""
    from bitsandbytes import nn

    peft = pytest.importorskip("peft")
    layer = nn.Linear4bit(96, 64, bias=False, quant_type="nf4", compress_statistics=False)
    layer.weight.data.copy_(values(64, 96))
    layer.to("cpu")
    weight = by_hand(layer.weight.data, layer.weight.quant_state)
    model = torch.nn.Sequential(layer)
    model.is_loaded_in_4bit = True
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
    merged = model.merge_and_unload()[0].weight
    check(by_hand(merged.data, merged.quant_state), weight)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_vision_tower_of_siglip(tmp_path):
    """The MLP of SigLIP so400m is 4304 wide: 67 blocks and a quarter. Here it is 80."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # as they are, all scales are about the same
    model.save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with four_bit.skip_for_other_reasons():
        model = transformers.SiglipVisionModel.from_pretrained(
            tmp_path, quantization_config=config, device_map="cpu"
        )
    model.train()  # in eval mode the layer may be repacked first: bnb-cpu-packing
    layers = [layer for layer in model.modules() if getattr(layer, "in_features", 0) == 80]
    assert type(layers[0]).__name__ == "Linear4bit"
    weight = by_hand(layers[0].weight.data, layers[0].weight.quant_state)
    with torch.no_grad():
        expected = layers[0](torch.zeros(2, 80)) + values(2, 80) @ weight.t()  # zeros give the bias
        assert torch.allclose(layers[0](values(2, 80)), expected, rtol=0.03, atol=0.03), "wrong scales"


@kinds
@pytest.mark.parametrize("shape", [(64, 64), (3, 192), (96,), (1, 80), (3, 16), (4, 36)], ids=str)
def test_other_shapes_are_as_they_were(shape, kind):
    """Bit for bit what the library gives without the patch."""
    packed, state = functional.quantize_4bit(values(*shape), quant_type=kind)
    patched = functional.dequantize_4bit(packed, state)
    diffusers_quantfix.revert(FIX_ID)
    try:
        assert "dequantize_blockwise" not in str(
            vars(functional.lib).get("cdequantize_blockwise_cpu_nf4_fp32")
        )
        bare = functional.dequantize_4bit(packed, state)
    finally:
        diffusers_quantfix.apply(FIX_ID)
    assert torch.equal(patched, bare)
    check(patched, by_hand(packed, state))


PROGRAM = """
import json, os
import bitsandbytes.cextension as cextension
from diffusers_quantfix.fixes.bitsandbytes import cpu_avx512_scales as fix
library = vars(cextension.lib)["_lib"]
count = getattr(library, "omp_get_max_threads", int)
before = len(os.listdir("/proc/self/task")), count()
fix.broken(cextension)
print(json.dumps([before, [len(os.listdir("/proc/self/task")), count()]]))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
@pytest.mark.long
def test_the_probe_starts_no_threads():
    """A child of a fork waits for ever for threads of OpenMP that its parent had."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "OMP_NUM_THREADS": "4", "DIFFUSERS_QUANTFIX": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = json.loads(said.stdout.splitlines()[-1])
    assert before == after
