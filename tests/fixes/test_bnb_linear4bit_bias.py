"""bnb-linear4bit-bias: the first run of a 4-bit layer converts its bias to the compute dtype, for good."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate import ONE_GRAPH, unmet

ROOT = Path(__file__).parents[2]
FIX_ID = "bnb-linear4bit-bias"
SHOWS = "the bias became|the dtype became|another output"

pytestmark = pytest.mark.skipif(
    bool(unmet("bitsandbytes>=0.46")), reason="4-bit layers run on the CPU from bitsandbytes 0.46 on"
)


def linear(dtype, compute_dtype, device="cpu"):
    """A ``Linear4bit`` [64, 64] in nf4 with a bias, and an input for it."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, compute_dtype=compute_dtype, quant_type="nf4").to(dtype).to(device)
    return layer, torch.randn(3, 64).to(device, dtype)


def pairs():
    import torch

    return [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_bias_stays_what_it_was(gpu):
    import torch

    for dtype, compute_dtype in pairs():
        layer, x = linear(dtype, compute_dtype, gpu.devices[0])
        bias, values = layer.bias, layer.bias.detach().clone()
        first = layer(x)
        assert layer.bias.dtype == dtype, f"the bias became {layer.bias.dtype}"
        assert layer.bias is bias
        assert torch.equal(bias, values)
        assert torch.equal(layer(x), first)
        assert first.dtype == dtype


def test_the_numbers_are_upstreams(gpu):
    """The same product as that of a layer whose bias has the compute dtype from the start."""
    import torch

    for dtype, compute_dtype in pairs():
        layer, x = linear(dtype, compute_dtype, gpu.devices[0])
        output = layer(x)
        # Not ``compute_dtype``: the first run of an older bitsandbytes chooses another one.
        layer.bias.data = layer.bias.data.to(layer.compute_dtype)
        assert torch.equal(layer(x), output)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_call_that_fails(gpu):
    import torch

    layer, _ = linear(torch.float16, torch.float32, gpu.devices[0])
    bias = layer.bias
    with pytest.raises(RuntimeError):
        layer(torch.ones(3, 32, dtype=torch.float16, device=gpu.devices[0]))
    assert layer.bias is bias
    assert layer.bias.dtype == torch.float16, f"the bias became {layer.bias.dtype}"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_bias_that_learns():
    import torch

    layer, x = linear(torch.float16, torch.float32)
    layer.bias.requires_grad_(True)
    layer(x).sum().backward()
    assert layer.bias.dtype == torch.float16, f"the bias became {layer.bias.dtype}"
    assert torch.equal(layer.bias.grad, torch.full((64,), 3.0, dtype=torch.float16))


def test_compiled():
    import torch

    # bitsandbytes 0.46 warns in the first forward pass, which torch does not trace.
    for requirement in (ONE_GRAPH["4-bit"], "bitsandbytes>=0.47"):
        if sentence := unmet(requirement):
            pytest.skip(sentence)
    layer, x = linear(torch.float16, torch.float32)
    expected = linear(torch.float16, torch.float32)[0](x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)
    assert layer.bias.dtype == torch.float16, f"the bias became {layer.bias.dtype}"


# before, the dtype of a model was that of its first parameter, the packed bytes of a weight
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.32")
def test_a_model_of_diffusers(gpu, tmp_path):
    """As a pipeline uses it: its dtype is that of the inputs of the next run."""
    import torch
    from diffusers import FluxTransformer2DModel

    from tests.rig import models

    models.saved(models.flux_transformer().to(torch.bfloat16), tmp_path)
    model = models.load_quantized(
        FluxTransformer2DModel, tmp_path, dtype=torch.bfloat16, bnb_4bit_compute_dtype=torch.float32
    )
    pipe = models.flux_pipeline(model)
    pipe.to(gpu.devices[0])
    first = models.call_flux(pipe, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16, f"the dtype became {model.dtype}"
    assert torch.equal(models.call_flux(pipe, dtype=torch.bfloat16), first), "another output"


TOOL = """
import bitsandbytes
original = bitsandbytes.nn.Linear4bit.forward
def own(self, x):
    return bitsandbytes.matmul_4bit(x, self.weight.t(), quant_state=self.weight.quant_state)
def around(self, x):
    return original(self, x)
def install(forward):
    bitsandbytes.nn.Linear4bit.forward = globals()[forward]
"""


@pytest.mark.skipif(bool(unmet("bitsandbytes>=0.50")), reason="the answers are those of bitsandbytes 0.50")
@pytest.mark.parametrize(
    ("forward", "answer"),
    [
        pytest.param(
            "own",
            "healthy: the bug is not present in bitsandbytes .*: {slot} before us; not patched",
            marks=pytest.mark.long,
        ),
        ("around", "failed: {slot} before us; import diffusers_quantfix before it"),
    ],
    ids=["own", "around"],
)
def test_the_forward_pass_of_another_tool_is_named_and_not_touched(tmp_path, forward, answer):
    (tmp_path / "tool.py").write_text(TOOL)
    program = (
        f"import tool; tool.install({forward!r}); code = tool.own.__code__, tool.around.__code__\n"
        "import diffusers_quantfix\n"
        f"said = diffusers_quantfix.status(load=False)[{FIX_ID!r}]\n"
        "assert code == (tool.own.__code__, tool.around.__code__)\n"
        "print(f'{said.state}: {said.reason}')"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DIFFUSERS_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**kept, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), kept.get("PYTHONPATH", "")])},
    )  # fmt: skip
    answer = answer.replace("{slot}", "bitsandbytes.nn.modules.Linear4bit.forward was replaced by tool")
    assert re.search(answer, done.stdout), done.stdout + done.stderr
