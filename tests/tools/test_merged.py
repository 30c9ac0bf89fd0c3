"""The packed weights that are kept while a LoRA is merged: `audit` names them, `track` counts them, `release` frees."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf
from tests.fixes import test_peft_merge_quanto as quanto
from tests.fixes import test_peft_unmerge_bnb as bnb
from tests.fixes import torchao_models as ao
from tests.fixes.merged import kept
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")


def _torchao(device):
    if unmet("torchao") or unmet("peft>=0.14"):
        pytest.skip("needs torchao, and peft 0.14, which knows it first")
    return ao.adapted("int8", device)


MODELS = {
    "nf4-double": lambda device: bnb.adapted("nf4-double", device),
    "int8": lambda device: bnb.adapted("int8", device),
    "quanto": lambda device: quanto.adapted("qint8").to(device),
    "torchao": _torchao,
}
backends = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def _before_merge(model) -> list:
    return [record for record in qf.audit(model).tensors if record.kind == "before merge"]


def assert_as_many(after: dict, before: dict) -> None:
    assert after.keys() == before.keys()
    for device, count in before.items():
        # Older bitsandbytes shares a code of 1 kB between the two layers until their bits were put back.
        assert count <= after[device] <= count + 1024


@backends
def test_audit_names_them(gpu, make):
    here = gpu.devices[0]
    model = make(here)
    before = qf.audit(model)
    assert "before merge" not in str(before)
    model.merge_adapter()
    merged = qf.audit(model)
    assert merged.ok
    found = _before_merge(model)
    # As many bytes as the packed weights and their scales have: all but the adapters and the bias.
    packed = sum(
        record.bytes
        for record in before.tensors
        if "lora" not in record.name and not record.name.endswith(("bias", "input_scale", "output_scale"))
    )
    total = sum(record.bytes for record in found)
    assert 0.9 * packed <= total <= packed
    assert {record.device for record in found} == {"cpu"} and merged.bytes["cpu"] == total
    assert merged.bytes[str(here)] == before.bytes[str(here)]
    assert "before merge" in str(merged) and "kept until it is unmerged" in merged.notes[-1]
    model.unmerge_adapter()
    after = qf.audit(model)
    assert not after.notes
    assert_as_many(after.bytes, before.bytes)


@backends
def test_track_counts_them(gpu, make):
    model = make(gpu.devices[0])
    with qf.track(model) as memory:
        model.merge_adapter()
        memory.mark("merged")
        model.unmerge_adapter()
        memory.mark("taken out")
    cpu = {sample.label: sample.allocated.get("cpu", 0) for sample in memory.samples}
    assert cpu["start"] == cpu["taken out"] == 0 < cpu["merged"] == memory.peak["cpu"]


@backends
def test_release_frees_them(gpu, make):
    here = gpu.devices[0]
    model = make(here)
    model.merge_adapter()
    total = sum(record.bytes for record in _before_merge(model))
    report = qf.release(model)
    assert not report.survivors and report.freed["cpu"] == total > 0


@backends
def test_release_of_a_pipeline_leaves_those_of_a_model_that_another_one_uses(gpu, make):
    model = make(gpu.devices[0])
    before = qf.audit(model).bytes
    model.merge_adapter()
    names = [record.name for record in _before_merge(model)]
    one, other = models.flux_pipeline(model), models.flux_pipeline(model)
    report = qf.release(one)
    assert [part.component for part in report.kept] == ["transformer of FluxPipeline"] and not report.freed
    assert [record.name for record in _before_merge(model)] == names and len(kept(model)) == 2
    other.transformer.unmerge_adapter()
    assert_as_many(qf.audit(model).bytes, before)
