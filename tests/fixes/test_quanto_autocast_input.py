"""quanto-tinygemm-autocast and quanto-awq-autocast: int4 weights under autocast; int8 weights on the CPU too."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_kernels
from tests.fixes import quanto_models as q
from tests.gate import unmet

# Before the devices of the rig are there: quanto looks for GPUs when it is imported.
pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)
torch = pytest.importorskip("torch")

TINYGEMM, AWQ, INT8 = "quanto-tinygemm-autocast", "quanto-awq-autocast", "quanto-int8-cpu-kernel"
SHOWS = r"expected scalar type|takes half precision|same dtype"
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)


def tinygemm():
    if unmet("optimum-quanto>=0.2.7") or unmet("torch>=2.6"):
        pytest.skip("this quanto packs for TinyGemm on a GPU only")
    model = q.layers("qint4", torch.bfloat16).requires_grad_(False)
    assert type(model[0].weight).__name__ == "TinyGemmWeightQBitsTensor"
    return model


def awq(gpu, monkeypatch):
    """Packed for AWQ, with a kernel that takes what upstream's takes (gemm_cuda.cu)."""
    quanto_kernels.capable(monkeypatch)
    model = q.layers("qint4", torch.float16).to(gpu.devices[0]).requires_grad_(False)
    assert type(model[0].weight).__name__ == "AWQWeightQBitsTensor"
    if gpu.kind == "rig":
        honest = torch.ops.quanto.gemm_f16i4_awq

        def kernel(input, other, scale, *args, **sizes):
            assert input.dtype == scale.dtype == torch.float16, f"it takes half precision, not {input.dtype}"
            return honest(input, other, scale, *args, **sizes)

        monkeypatch.setattr(torch.ops.quanto, "gemm_f16i4_awq", kernel)
    return model


def plain(model):
    """Layers of torch with the same weights, in float32 on the CPU."""
    twin = q.plain_layers()
    for layer, of in zip(twin, model, strict=True):
        layer.weight.data.copy_(of.weight.dequantize().float().cpu())
        layer.bias.data.copy_(of.bias.float().cpu())
    return twin


def assert_like_torch(model, given, autocast) -> None:
    """The output and the gradient of the input; the dtype is quanto's own."""
    device = model[0].bias.device.type
    given = given.to(device).requires_grad_(True)
    reference = given.detach().float().cpu().requires_grad_(True)
    expected = plain(model)(reference)
    expected.sum().backward()
    with torch.autocast(device, dtype=autocast):
        found = model(given)
    assert q.error(found.detach(), expected.detach()) < 0.03
    found.float().sum().backward()
    assert given.grad.dtype == given.dtype
    assert q.error(given.grad, reference.grad) < 0.03


@pytest.mark.defect(TINYGEMM, shows=SHOWS)
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tinygemm(dtype, autocast):
    assert_like_torch(tinygemm(), q.inputs(dtype), autocast)


@pytest.mark.defect(AWQ, shows=SHOWS)
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_awq(gpu, monkeypatch, dtype, autocast):
    assert_like_torch(awq(gpu, monkeypatch), q.inputs(dtype), autocast)


@pytest.mark.defect(INT8, shows=SHOWS)
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.float16], ids=str)
def test_int8_on_the_cpu(weights, autocast):
    assert_like_torch(q.layers("qint8", weights).requires_grad_(False), q.inputs(torch.bfloat16), autocast)


@pytest.mark.parametrize("autocast", HALVES, ids=str)
def test_the_dtype_of_the_weight(autocast):
    """As before: the kernel gets the input itself."""
    model = tinygemm()
    given = q.inputs(torch.bfloat16)
    with torch.no_grad():
        expected = model(given)
        with torch.autocast("cpu", dtype=autocast):
            assert torch.equal(model(given), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_without_autocast_it_is_refused(dtype):
    """As a layer of torch refuses it."""
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected scalar type"):
        tinygemm()(q.inputs(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_what_autocast_does_not_cast_is_refused(dtype):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError):
        tinygemm()(torch.ones(3, 256, dtype=dtype))


def test_a_parameter_as_the_input():
    model = tinygemm()
    given = torch.nn.Parameter(q.inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(given)
    assert q.error(output.detach(), plain(model)(given.detach()).detach()) < 0.03


def test_a_block_with_a_normalization_is_trained():
    """LoRA beside a frozen layer, with checkpointing: the normalization gives float32."""
    from torch.utils.checkpoint import checkpoint

    model = tinygemm()
    norm, lora = torch.nn.LayerNorm(256), torch.nn.Linear(256, 256, bias=False)
    torch.nn.init.normal_(lora.weight, std=0.02)

    def block(states):
        states = norm(states.float())
        return model[1](model[0](states) + lora(states))

    grads = []
    for run in (block, lambda states: checkpoint(block, states, use_reentrant=False)):
        lora.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(q.inputs(torch.bfloat16)).float().square().mean().backward()
        grads.append(lora.weight.grad.clone())
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)
