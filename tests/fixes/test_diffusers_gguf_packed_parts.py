"""diffusers-gguf-packed-parts: biases, norms, convolutions and loose parameters that a GGUF file has packed."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import gguf_models, lora_models
from tests.fixes.offloaded import offload
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("gguf")

FIX_ID = "diffusers-gguf-packed-parts"
SHOWS = r"must match the existing size|bias type \(unsigned char\)|expected bias to be 1-dimensional"
# With these diffusers has a second bug in this model, diffusers-gguf-kept-modules.
WAN = "diffusers>=0.39"


def flux(folder, rest: str, kind: str = "Q8_0", dtype=None):
    """A Flux transformer whose Linear weights are packed as ``kind`` in the file, and everything else as ``rest``."""
    return gguf_models.packed(models.flux_transformer(), folder, kind, rest, dtype)


def alike(output, reference) -> None:
    import torch

    found = torch.nn.functional.cosine_similarity(
        output.flatten().float(), reference.flatten().float(), dim=0
    )
    assert found > 0.999, f"the output is another one ({found:.4f})"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.32")
def test_flux(tmp_path, kind, dtype):
    import torch

    dtype = getattr(torch, dtype)
    model = flux(tmp_path / "packed", "BF16", kind, dtype)
    plain = flux(tmp_path / "plain", "F32", kind, dtype)
    outputs = [
        models.call_flux(models.flux_pipeline(one), dtype=dtype, steps=2).float() for one in (model, plain)
    ]
    alike(*outputs)
    assert len(gguf_models.weights_of(model)) == len(gguf_models.weights_of(plain))


@pytest.mark.parametrize("rest", ["BF16", "Q8_0 where it can"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=WAN)
def test_a_convolution_and_a_loose_parameter(tmp_path, rest):
    import torch

    rest = rest.partition(" ")[0]
    wans = [gguf_models.wan_model() for _ in range(2)]
    model = gguf_models.packed(wans[0], tmp_path / "packed", "Q8_0", rest)
    plain = gguf_models.packed(wans[1], tmp_path / "plain", "Q8_0", "F32")
    alike(gguf_models.run_wan(model), gguf_models.run_wan(plain))
    assert type(model.scale_shift_table) is torch.nn.Parameter


def test_one_step_further(gpu, tmp_path):
    """Offloaded, copied, dequantized, and with a LoRA."""
    import torch

    if sentence := unmet("diffusers>=0.33"):
        pytest.skip(sentence)
    here = gpu.devices[0]
    model, plain = flux(tmp_path / "packed", "BF16"), flux(tmp_path / "plain", "F32")
    # BF16 has rounded what the other file has whole
    with torch.no_grad():
        for parameter in plain.parameters():
            if type(parameter).__name__ != "GGUFParameter":
                parameter.copy_(parameter.bfloat16())

    def both(act):
        return [act(one) for one in (model, plain)]

    assert torch.equal(*both(gguf_models.run))
    assert torch.equal(*both(lambda one: gguf_models.run(copy.deepcopy(one))))

    def with_lora(one):
        pipe = models.flux_pipeline(one)
        pipe.load_lora_weights(lora_models.weights(), adapter_name="one")
        output = gguf_models.run(one)
        pipe.unload_lora_weights()
        return output

    assert torch.equal(*both(with_lora))

    def offloaded(one):
        one = copy.deepcopy(one)
        offload(one, device=here)
        return gguf_models.run(one, here)

    assert torch.equal(*both(offloaded))
    assert torch.equal(*both(lambda one: gguf_models.run(one.dequantize())))
