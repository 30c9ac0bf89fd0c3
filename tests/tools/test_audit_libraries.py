"""`audit` and `release` with optimum-quanto, torchao and GGUF weights."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.rig import models


def _quanto(model):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


def _torchao(model):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())


_LIBRARIES = pytest.mark.parametrize("quantize", [_quanto, _torchao], ids=["quanto", "torchao"])


@_LIBRARIES
def test_inner_tensors_are_listed_and_released(gpu, quantize):
    device = gpu.devices[0]
    before = gpu.allocated(device)
    model = models.flux_transformer()
    quantize(model)
    model.to(device)
    audit = qf.audit(model)
    assert audit.ok, audit
    inner = [record for record in audit.tensors if "to_q.weight." in record.name]
    assert {record.dtype for record in inner} >= {"int8"}
    if gpu.kind == "rig":
        assert audit.bytes == {str(device): gpu.allocated(device) - before}
    report = qf.release(model)
    assert report.ok, report
    assert gpu.allocated(device) == before


@_LIBRARIES
def test_an_inner_tensor_that_stayed_behind_is_misplaced(gpu, quantize):
    model = models.flux_transformer()
    quantize(model)
    model.to(gpu.devices[0])
    weight = model.x_embedder.weight
    name = next(n for n in weight.__tensor_flatten__()[0] if "scale" in n)
    setattr(weight, name, getattr(weight, name).cpu())
    audit = qf.audit(model)
    assert [found.tensor.name for found in audit.misplaced] == [f"x_embedder.weight.{name}"]
    assert "the weight that it is part of" in audit.misplaced[0].reason


def test_gguf_weights_are_listed_and_released(gpu, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    import torch
    from diffusers.quantizers.gguf.utils import GGUFParameter

    device = gpu.devices[0]
    before = gpu.allocated(device)
    values = torch.randn(64, 64).numpy()
    packed = torch.from_numpy(gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0).copy())
    model = torch.nn.Module()
    model.weight = GGUFParameter(packed.to(device), quant_type=gguf.GGMLQuantizationType.Q8_0)
    audit = qf.audit(model)
    assert audit.bytes == {str(device): packed.nbytes}
    assert qf.release(model).ok
    assert gpu.allocated(device) == before
