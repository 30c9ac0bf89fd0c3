"""`audit`: every tensor is found and counted once, and what is misplaced is named."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import weakref

import pytest

import diffusers_quantfix as qf
from tests.rig import models
from tests.tools.pipelines import flux, load, strip_companions


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_bytes_are_those_of_the_device(gpu, tmp_path, bits):
    device = gpu.devices[0]
    before = gpu.allocated(device)
    pipeline = flux(tmp_path, bits, text=True, device=device)
    audit = qf.audit(pipeline)
    assert audit.ok, audit
    _assert_about(gpu, audit.bytes[str(device)], gpu.allocated(device) - before, len(audit.tensors))
    assert set(audit.bytes) <= {str(device), "cpu"}  # the scheduler's tables
    assert {record.component for record in audit.tensors if record.device == "cpu"} <= {"scheduler"}
    models.call_flux(pipeline)
    audit = qf.audit(pipeline)
    assert audit.ok, audit
    _assert_about(gpu, audit.bytes[str(device)], gpu.allocated(device) - before, len(audit.tensors))


def _assert_about(gpu, counted: int, held: int, tensors: int) -> None:
    # CUDA rounds each block up to 512 bytes; the rig counts exactly.
    assert held - (512 * tensors if gpu.kind == "cuda" else 0) <= counted <= held


@pytest.mark.parametrize("bits", [4, 8])
def test_companions_are_listed_before_and_after_the_first_forward(gpu, tmp_path, bits):
    pipeline = flux(tmp_path, bits)
    kind, names = ("quant state", {"absmax", "code"}) if bits == 4 else ("8-bit state", {"CB", "SCB"})
    for _ in range(2):
        found = {r.name.rpartition(".")[2] for r in qf.audit(pipeline).tensors if r.kind == kind}
        assert names <= found
        models.call_flux(pipeline)


def test_nested_quant_states_are_listed(gpu, tmp_path):
    from diffusers import FluxTransformer2DModel

    folder = models.saved(models.flux_transformer(), tmp_path)
    model = load(FluxTransformer2DModel, folder, 4, bnb_4bit_use_double_quant=True)
    names = {record.name.partition("quant_state.")[2] for record in qf.audit(model).tensors}
    assert {"absmax", "code", "offset", "state2.absmax", "state2.code"} <= names


@pytest.mark.parametrize("bits", [4, 8])
def test_a_companion_that_stayed_behind_is_misplaced(gpu, tmp_path, bits):
    pipeline = flux(tmp_path, bits)
    assert qf.audit(pipeline).ok
    layer = strip_companions(pipeline.transformer, gpu.pair[1])
    audit = qf.audit(pipeline)
    assert not audit.ok
    assert all(f"transformer.{layer}." in found.tensor.path for found in audit.misplaced)
    device, elsewhere = gpu.pair
    assert {found.reason for found in audit.misplaced} == {f"is on {elsewhere}, its weight on {device}"}
    with pytest.raises(qf.placement.MisplacedError, match=layer) as raised:
        audit.raise_if_misplaced()
    assert raised.value.audit is audit
    raised.value.tag = "a tag"
    for again in (
        pickle.loads(pickle.dumps(raised.value)),
        copy.deepcopy(raised.value),
    ):  # as from a worker process
        assert (str(again), again.audit, again.tag) == (str(raised.value), audit, "a tag")
    assert "misplaced: " in str(audit)
    assert layer in str(audit)


def test_a_4bit_move_leaves_nothing_behind(gpu, tmp_path):
    import torch

    pipeline = flux(tmp_path, 4)
    for device in (gpu.pair[1], "cpu", gpu.pair[0]):
        pipeline.transformer.to(device)
        audit = qf.audit(pipeline.transformer)
        assert audit.ok, audit
        assert list(audit.bytes) == [str(torch.device(device))]


def test_a_split_component_is_misplaced_and_a_split_pipeline_is_noted(gpu):
    pipeline = models.flux_pipeline(text=True)
    pipeline.transformer.to(gpu.devices[0])
    audit = qf.audit(pipeline)
    assert audit.ok
    assert "different devices" in audit.notes[0]
    pipeline.transformer.norm_out.to("cpu")
    found = qf.audit(pipeline).misplaced
    assert {m.tensor.name for m in found} == {
        f"norm_out.{n}" for n, _ in pipeline.transformer.norm_out.named_parameters()
    }
    assert "without a device map" in found[0].reason


def test_a_device_map_is_no_fault(gpu):
    import accelerate

    model = models.flux_transformer()
    first = {name: gpu.pair[0] for name, _ in model.named_children()}
    accelerate.dispatch_model(model, {**first, "norm_out": gpu.pair[1]}, main_device=gpu.pair[0])
    audit = qf.audit(model)
    assert audit.ok, audit
    assert audit.offload == {"FluxTransformer2DModel": "device map"}


def test_offloaded_weights_are_no_fault_and_an_honest_meta_model_is(gpu):
    import accelerate

    pipeline = models.flux_pipeline()
    full = qf.audit(pipeline.transformer).bytes["cpu"]
    pipeline.enable_sequential_cpu_offload(device=gpu.devices[0])
    models.call_flux(pipeline, gpu.devices[0], dtype=pipeline.transformer.dtype)
    audit = qf.audit(pipeline)
    assert audit.ok, audit
    assert audit.offload == {"transformer": "sequential"}
    assert audit.component_bytes()["transformer"]["cpu"] == full  # what the hooks keep aside
    with accelerate.init_empty_weights():
        hollow = models.flux_transformer()
    audit = qf.audit(hollow)
    assert len(audit.misplaced) == len(list(hollow.parameters()))
    assert "no offload hook" in audit.misplaced[0].reason
    assert audit.bytes == {}


@pytest.mark.parametrize("mode", ["sequential", "model"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_that_is_offloaded_is_no_fault(gpu, tmp_path, bits, mode):
    pipeline = flux(tmp_path, bits)
    getattr(pipeline, f"enable_{mode}_cpu_offload")(device=gpu.devices[0])
    models.call_flux(pipeline, gpu.devices[0])
    audit = qf.audit(pipeline.transformer)
    assert audit.ok, audit
    pipeline.maybe_free_model_hooks()
    assert list(qf.audit(pipeline.transformer).bytes) == ["cpu"]


def test_model_offload_is_no_fault(gpu):
    pipeline = models.flux_pipeline(text=True)
    pipeline.enable_model_cpu_offload(device=gpu.devices[0])
    models.prompt_flux(pipeline)
    audit = qf.audit(pipeline)
    assert audit.ok, audit
    assert set(audit.offload.values()) == {"model"}


@pytest.mark.parametrize("stream", [False, True])
def test_group_offload_is_no_fault(gpu, stream):
    transformer = models.flux_transformer()
    if not hasattr(transformer, "enable_group_offload"):
        pytest.skip("this diffusers has no group offloading")
    pipeline = models.flux_pipeline(transformer)
    full = qf.audit(transformer).bytes["cpu"]
    transformer.enable_group_offload(
        onload_device=gpu.devices[0], offload_type="leaf_level", use_stream=stream, low_cpu_mem_usage=True
    )
    models.call_flux(pipeline, gpu.devices[0], dtype=transformer.dtype)
    audit = qf.audit(pipeline)
    assert audit.ok, audit
    assert audit.offload == {"transformer": "group"}
    assert audit.component_bytes()["transformer"]["cpu"] == full


def test_the_table_fits_a_terminal_and_the_dict_is_json(gpu, tmp_path):
    pipeline = flux(tmp_path, 8, text=True, device=gpu.devices[0])
    strip_companions(pipeline.transformer, "cpu")
    audit = qf.audit(pipeline)
    assert max(map(len, str(audit).splitlines())) <= 80
    told = json.loads(json.dumps(audit.to_dict()))
    assert told["ok"] is False
    assert len(told["tensors"]) == len(audit.tensors)
    assert told["misplaced"][0]["reason"]


def test_components_may_be_missing_or_a_dict():
    pipeline = models.flux_pipeline()
    audit = qf.audit(pipeline)
    assert audit.components["vae"] == "None"
    assert "set to None: " in str(audit)
    again = qf.audit({"transformer": pipeline.transformer, "vae": None, "scheduler": pipeline.scheduler})
    assert again.bytes == audit.bytes
    assert qf.audit({}).ok


def test_a_modular_pipeline(gpu):
    modular = pytest.importorskip(
        "diffusers.modular_pipelines", reason="this diffusers has no modular pipelines"
    )
    if not hasattr(modular, "FluxAutoBlocks"):
        pytest.skip("this diffusers has no modular Flux")
    pipeline = modular.FluxAutoBlocks().init_pipeline()
    assert qf.audit(pipeline).ok
    update = getattr(pipeline, "update_components", None) or pipeline.register_components
    update(transformer=models.flux_transformer().to(gpu.devices[0]))
    audit = qf.audit(pipeline)
    assert list(audit.bytes) == [str(gpu.devices[0])]
    assert audit.components["transformer"] == "FluxTransformer2DModel"


def test_a_peft_adapter_is_part_of_the_model(gpu):
    peft = pytest.importorskip("peft")
    transformer = models.flux_transformer().to(gpu.devices[0])
    before = qf.audit(transformer).bytes[str(gpu.devices[0])]
    transformer.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q"]))
    audit = qf.audit(transformer)
    assert audit.ok, audit
    assert audit.bytes[str(gpu.devices[0])] > before
    assert any("lora_A" in record.name for record in audit.tensors)


def test_shared_memory_is_counted_once():
    import torch

    table = torch.nn.Embedding(10, 64)
    head = torch.nn.Linear(64, 10, bias=False)
    head.weight = table.weight
    half = torch.nn.Linear(64, 5, bias=False)
    half.weight = torch.nn.Parameter(table.weight.detach()[:5])
    audit = qf.audit({"table": table, "head": head, "half": half})
    assert audit.bytes == {"cpu": 10 * 64 * 4}


def test_a_lazy_parameter_has_no_bytes_yet():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())
    audit = qf.audit(model)
    lazy = {record.name: (record.shape, record.bytes) for record in audit.tensors if record.name[0] in "12"}
    assert {"1.weight", "1.bias", "2.weight", "2.running_mean"} <= set(lazy)
    assert {found for name, found in lazy.items() if "batches" not in name} == {((), 0)}
    assert audit.ok, audit
    assert audit.component_bytes()["Sequential"]["cpu"] == (2 * 3 + 3) * 4 + 8  # and num_batches_tracked
    model(torch.ones(2, 2))
    assert ("1.weight", (4, 3)) in {(record.name, record.shape) for record in qf.audit(model).tensors}


def test_a_nested_tensor_has_no_shape():
    import torch

    model = torch.nn.Linear(2, 2)
    model.cache = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    assert ("cache[0]", ()) in {(record.name, record.shape) for record in qf.audit(model).tensors}


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (3, "type int"),
        ("pipe", "type str"),
        (None, "type NoneType"),
        (dict, "the class dict"),
        ({1: None}, "1 is no name"),
    ],
)
def test_what_is_no_model_is_said_in_one_sentence(target, what):
    with pytest.raises(TypeError, match=what) as raised:
        qf.audit(target)
    assert "\n" not in str(raised.value)


def test_importing_the_package_loads_no_tool():
    program = (
        "import sys; before = set(sys.modules); import diffusers_quantfix as qf;"
        "assert 'audit' in dir(qf); new = set(sys.modules) - before;"
        "print([m for m in new if 'memory' in m or 'placement' in m or m in ('torch', 'typing', 'dataclasses')]);"
        "qf.audit({}); qf.track({}); qf.release(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
    with pytest.raises(AttributeError, match="adit"):
        qf.adit  # noqa: B018


def test_a_companion_that_another_thread_moves_meanwhile(gpu):
    """Before: TypeError, as of an 8-bit layer in its first pass."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from diffusers_quantfix.weights.companions import companions

    layer = bitsandbytes.nn.Linear8bitLt(16, 16, has_fp16_weights=False).to(gpu.devices[0])
    found = companions(layer)
    first = next(found)
    layer.weight.CB = layer.weight.SCB = None
    assert first.tensor is not None
    assert list(found) == []


def test_a_class_that_a_function_makes_is_not_kept():
    """A notebook defines its classes again and again."""
    import torch

    def one():
        class Part:
            __slots__ = ("__weakref__", "weight")

        class Kept(torch.nn.Parameter):
            pass

        model, part = torch.nn.Linear(2, 2), Part()
        model.part, part.weight = part, torch.ones(3)
        model.weight = Kept(torch.ones(2, 2))
        assert qf.audit({"model": model}).bytes["cpu"] == 4 * (4 + 2 + 3)
        return [weakref.ref(Part), weakref.ref(Kept)]

    left = one()
    gc.collect()
    assert [kind() for kind in left] == [None, None]
