"""diffusers-gguf-compile: A compiled GGUF model fails, or its output is a GGUF weight."""

from __future__ import annotations

import shutil

import pytest

from tests.fixes import gguf_models
from tests.gate import unmet

FIX_ID = "diffusers-gguf-compile"
# torch before 2.12 puts the node of the graph into the same message.
FAILS = r"^(KeyError|RuntimeError): '?None"
IS_A_WEIGHT = "a GGUFParameter"

FEATURES = 64


@pytest.fixture(autouse=True)
def fresh():
    """What one test compiles is no other one's."""
    torch = pytest.importorskip("torch")
    if unmet("torch>=2.7"):
        pytest.skip("before 2.7 torch compiles no function of a tensor with attributes of its own")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(kind: str = "Q8_0"):
    """Two GGUF layers, with a concatenation between them whose first tensor does not depend on a weight."""
    import torch

    utils = pytest.importorskip("diffusers.quantizers.gguf.utils", reason="this diffusers has no GGUF")
    gguf = pytest.importorskip("gguf")
    packed = gguf.GGMLQuantizationType[kind]
    if not hasattr(utils, "GGUFLinear") or packed not in utils.dequantize_functions:
        pytest.skip(f"this diffusers cannot load {kind}")

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = (
                utils.GGUFLinear(FEATURES, FEATURES, bias=True, compute_dtype=torch.float32) for _ in range(2)
            )
            for layer in (self.first, self.second):
                numbers = gguf.quants.quantize(torch.randn(FEATURES, FEATURES).numpy(), packed)
                layer.weight = utils.GGUFParameter(torch.from_numpy(numbers), quant_type=packed)
                layer.bias.requires_grad_(False)

        def forward(self, inputs):
            hidden = torch.nn.functional.silu(self.first(inputs))
            return self.second(torch.cat([inputs, hidden])) + 1

    return Layers().eval()


def inputs():
    import torch

    return torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(1))


def check(output, expected) -> None:
    import torch

    assert type(output) is torch.Tensor, f"the output is a {type(output).__name__}"
    assert torch.equal(output, expected)


def run(model, device="cpu"):
    """The output of a compiled model; skips where this torch cannot trace it, whatever its weights are."""
    import torch

    try:
        return gguf_models.run(model, device)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.InternalTorchDynamoError) as reason:
        pytest.skip(f"this torch cannot trace the model: {str(reason)[:80]}")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16"])
@pytest.mark.defect(FIX_ID, shows=FAILS)
def test_layers(kind):
    import torch

    model, x = layers(kind), inputs()
    with torch.no_grad():
        expected = model(x)
        check(torch.compile(model, backend="aot_eager")(x), expected)


@pytest.mark.defect(FIX_ID, shows=FAILS)
def test_a_graph_break_between_them():
    import torch

    class Broken(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            hidden = self.model.first(inputs)
            torch._dynamo.graph_break()
            return self.model.second(torch.cat((inputs, hidden)))

    model, x = Broken(layers()), inputs()
    with torch.no_grad():
        expected = model(x)
        check(torch.compile(model, backend="aot_eager")(x), expected)


@pytest.mark.defect(FIX_ID, shows=FAILS)
def test_gradients_of_the_inputs():
    """A LoRA is trained with them. The operators of the graph backward are not those of autograd on every torch."""
    import torch

    model, x = layers(), inputs().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    output = torch.compile(model, backend="aot_eager")(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    assert type(gradient) is torch.Tensor
    assert torch.allclose(gradient, expected)


@pytest.mark.long
@pytest.mark.defect(FIX_ID, shows=IS_A_WEIGHT)
def test_a_pipeline(tmp_path):
    model = gguf_models.transformer(tmp_path)
    expected = gguf_models.run(model)
    model.compile(backend="aot_eager")
    check(run(model), expected)


@pytest.mark.defect(FIX_ID, shows=FAILS)
@pytest.mark.long
def test_its_blocks(tmp_path):
    """As the documentation of diffusers shows it."""
    model = gguf_models.transformer(tmp_path)
    expected = gguf_models.run(model)
    if not hasattr(model, "compile_repeated_blocks"):
        pytest.skip("this diffusers has no compile_repeated_blocks")
    model.compile_repeated_blocks(backend="aot_eager")
    check(run(model), expected)


@pytest.mark.long
@pytest.mark.defect(FIX_ID, shows=f"{IS_A_WEIGHT}|{FAILS}")
def test_with_a_lora(tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    model = gguf_models.transformer(tmp_path)
    torch.manual_seed(3)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False))
    expected = gguf_models.run(model)
    model.compile(backend="aot_eager")
    check(run(model), expected)
    model.disable_adapters()
    if unmet("torch>=2.10") and not unmet("torch>=2.9"):
        return  # torch 2.9 goes on with the graph of the adapter, of a plain model too
    without = run(model)
    assert not torch.equal(without, expected)
    check(without, gguf_models.run(gguf_models.transformer(tmp_path)))


@pytest.mark.long
@pytest.mark.defect(FIX_ID, shows=IS_A_WEIGHT)
def test_one_graph(tmp_path):

    model = gguf_models.transformer(tmp_path)
    expected = gguf_models.run(model)
    model.compile(backend="aot_eager", fullgraph=True)
    check(run(model), expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.defect(FIX_ID, shows=f"{IS_A_WEIGHT}|{FAILS}")
def test_group_offload(tmp_path, kind):
    """On the CPU: what torch.compile keeps of a device stays there, and other tests count it."""
    import torch

    model = gguf_models.transformer(tmp_path)
    if not hasattr(model, "enable_group_offload"):
        pytest.skip("this diffusers has no group offload")
    expected = gguf_models.run(gguf_models.transformer(tmp_path))
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    try:
        model.enable_group_offload(onload_device=torch.device("cpu"), offload_type=kind, **options)
    except AttributeError:
        pytest.skip("this diffusers asks for the accelerator")
    model.compile(backend="aot_eager")
    check(run(model), expected)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor():
    """It computes the products in float32 that eager rounds to float16: not exact, but nearer to the true numbers."""
    import torch

    model, x = layers("Q4_0"), inputs()
    with torch.no_grad():
        expected = model(x)
        output = torch.compile(model, backend="inductor")(x)
    assert type(output) is torch.Tensor
    assert torch.allclose(output, expected, rtol=0, atol=2e-3 * expected.abs().max())


def test_what_a_conversion_calls_still_gives_weights():
    import torch

    weight = layers().first.weight
    for result in (
        torch.cat([weight, weight]),
        weight.to("cpu", copy=True),
        *weight.chunk(2),
        *torch.split(weight, 32),
    ):
        assert type(result) is type(weight)
        assert result.quant_type == weight.quant_type
    assert type(torch.ops.aten.cat([weight, weight])) is type(weight)  # a custom kernel is called like this
