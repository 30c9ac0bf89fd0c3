"""`keep_host_copies`: what did not change on a device is not copied back, and what changed is."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

import diffusers_quantfix as qf
from tests.rig import models
from tests.tools.pipelines import flux


def _bytes(pipeline) -> int:
    return sum(record.bytes for record in qf.audit(pipeline).tensors)


def _state(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _same(one: dict, other: dict) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        one[name].device == other[name].device and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_model_offload_copies_nothing_back(rig_devices, tmp_path, bits):
    here = rig_devices.devices[0]
    pipeline = flux(tmp_path, bits)
    pipeline.to("cpu")
    pipeline.enable_model_cpu_offload(device=here)
    weights = _bytes(pipeline.transformer)
    rig_devices.reset()
    models.call_flux(pipeline, here)
    pipeline.maybe_free_model_hooks()
    plain = rig_devices.traffic().d2h
    expected = _state(pipeline.transformer)
    qf.keep_host_copies(pipeline)
    for _ in range(3):
        rig_devices.reset()
        models.call_flux(pipeline, here)
        pipeline.maybe_free_model_hooks()
        moved = rig_devices.traffic()
        assert moved.h2d >= 0.9 * weights
        assert moved.d2h <= plain - 0.97 * weights
        assert _same(_state(pipeline.transformer), expected)
    assert rig_devices.allocated(here) < 0.01 * weights
    qf.keep_host_copies(pipeline, keep=False)
    rig_devices.reset()
    models.call_flux(pipeline, here)
    pipeline.maybe_free_model_hooks()
    assert rig_devices.traffic().d2h == plain


def _in_place(weight):
    weight[0, 0] += 1


def _through_data(weight):
    weight.data[0, 0] += 1


def _other_memory(weight):
    weight.data = weight.data * 2


def _two_rows(weight):
    weight.data[[0, 1]] = weight.data[[1, 0]].clone()


def _signs(weight):
    weight.data[:, 1].neg_()


@pytest.mark.parametrize("change", [_in_place, _through_data, _other_memory, _two_rows, _signs])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_changed_on_the_device_is_copied(gpu, change, dtype):
    import torch

    here = gpu.devices[0]
    model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Linear(7, 5)).to(getattr(torch, dtype))
    qf.keep_host_copies(model)
    model.to(here)
    with torch.no_grad():
        change(model[0].weight)
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    model.to("cpu")
    assert _same(_state(model), expected)


def test_a_change_on_the_cpu_that_is_taken_back_on_the_device(gpu):
    """The content on the device is then that of an earlier time, and the copy's is not."""
    import torch

    model = torch.nn.Linear(8, 8)
    first = _state(model)
    qf.keep_host_copies(model)
    model.to(gpu.devices[0])
    model.to("cpu")
    model.weight.data += 1
    model.to(gpu.devices[0])
    model.weight.data.copy_(first["weight"])
    model.to("cpu")
    assert _same(_state(model), first)


def test_training_on_the_device(gpu):
    import torch

    here = gpu.devices[0]
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    other.load_state_dict(model.state_dict())
    qf.keep_host_copies(model)
    for one in (model, other):
        one.to(here)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(torch.ones(1, 8, device=here)).sum().backward()
        optimizer.step()
        one.to("cpu")
    assert _same(_state(model), _state(other))
    assert model.weight.grad is None or model.weight.grad.device == model.weight.device


def test_a_lora_that_is_fused_and_unfused_on_the_device(gpu, tmp_path):
    pytest.importorskip("peft")
    from peft import LoraConfig

    here = gpu.devices[0]
    states = []
    for keeps in (False, True):
        pipeline = flux(tmp_path)
        if keeps:
            qf.keep_host_copies(pipeline)
        pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        for name, parameter in pipeline.transformer.named_parameters():
            if "lora" in name:
                parameter.data.fill_(0.01)
        for fuse in ("fuse_lora", "unfuse_lora", None):
            pipeline.transformer.to(here)
            if fuse:
                getattr(pipeline.transformer, fuse)()
            pipeline.transformer.to("cpu")
            states.append(_state(pipeline.transformer))
    for without, with_copies in zip(states[:3], states[3:], strict=True):
        assert _same(without, with_copies)
    assert not _same(states[3], states[4])


def _quanto(weights: str):
    import torch

    from tests.fixes import quanto_models

    quanto = quanto_models.quanto()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(2)))
    quanto.quantize(model, weights=getattr(quanto, weights))
    quanto.freeze(model)
    return model


def _torchao(weights: str):
    import torch

    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(2))).bfloat16()
    try:
        config = getattr(quantization, weights)(version=2)
    except TypeError:  # before 0.15
        config = getattr(quantization, weights)()
    quantization.quantize_(model, config)
    return model


WRAPPERS = {
    "quanto int8": lambda: _quanto("qint8"),
    "quanto int4": lambda: _quanto("qint4"),
    "quanto float8": lambda: _quanto("qfloat8"),
    "torchao int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao float8": lambda: _torchao("Float8WeightOnlyConfig"),
}
wrappers = pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)


def _dequantized(model) -> list:
    import torch

    with torch.no_grad():
        return [layer.weight.dequantize().cpu() for layer in model]


def _inner(model) -> list:
    from diffusers_quantfix.weights.wrappers import inner_places

    return [getattr(holder, name) for layer in model for holder, name in inner_places(layer.weight)]


@wrappers
def test_weights_with_inner_tensors_are_not_copied_back(rig_devices, make):
    import torch

    here = rig_devices.devices[0]
    model = make()
    expected = _dequantized(model)
    qf.keep_host_copies(model)
    for _ in range(2):
        hosts = [tensor.data_ptr() for tensor in _inner(model)]
        model.to(here)
        assert all(tensor.device == here for tensor in [*model.parameters(), *_inner(model)])
        rig_devices.reset()
        model.to("cpu")
        # A checksum of 8 bytes for each inner tensor, bias and buffer.
        tensors = [*_inner(model), *model.parameters(), *model.buffers()]
        assert rig_devices.traffic().d2h <= 8 * len(tensors)
        assert [tensor.data_ptr() for tensor in _inner(model)] == hosts
        assert all(tensor.device.type == "cpu" for tensor in [*model.parameters(), *_inner(model)])
        del tensors  # no copies are kept of what something else has
    assert rig_devices.allocated(here) == 0
    assert all(map(torch.equal, _dequantized(model), expected))


@wrappers
def test_a_weight_of_which_one_inner_tensor_changed_is_copied_whole(gpu, make):
    import torch

    model = make()
    qf.keep_host_copies(model)
    model.to(gpu.devices[0])
    scale = min(_inner(model[:1]), key=torch.numel)
    with torch.no_grad():
        scale.mul_(2)
    expected = _dequantized(model)
    model.to("cpu")
    assert all(tensor.device.type == "cpu" for tensor in [*model.parameters(), *_inner(model)])
    assert all(map(torch.equal, _dequantized(model), expected))


@wrappers
def test_weights_with_inner_tensors_that_a_graph_has_are_moved_as_upstream_does(gpu, make):
    import torch

    model = make().requires_grad_(True)
    with torch.no_grad():
        expected = _dequantized(model)
    qf.keep_host_copies(model)
    model.to(gpu.devices[0])
    graph = [layer.weight.dequantize().sum() for layer in model]
    model.to("cpu")
    assert all(tensor.device.type == "cpu" for tensor in [*model.parameters(), *_inner(model)])
    assert all(map(torch.equal, _dequantized(model), expected))
    del graph


@wrappers
@pytest.mark.parametrize("at", range(4))
def test_ctrl_c_between_the_parts_of_a_weight(rig_devices, monkeypatch, make, at):
    """Before, of torchao: the next move raised "Couldn't swap Linear.weight"."""
    import torch

    from diffusers_quantfix.memory import host_copies

    here, model = rig_devices.devices[0], make()
    expected = _dequantized(model)
    qf.keep_host_copies(model)
    model.to(here)
    put, seen = host_copies._Slot.put, []

    def interrupted(slot, tensor):
        put(slot, tensor)
        seen.append(slot)
        if len(seen) == at + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host_copies._Slot, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.to("cpu")
    for place in (here, "cpu"):
        model.to(place)
        assert all(map(torch.equal, _dequantized(model), expected))


@pytest.mark.parametrize("name", ["plain", "quanto int8", "torchao int8"])
def test_pinned_copies_are_taken_back_pinned(gpu, name):
    import torch

    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = plain if name == "plain" else WRAPPERS[name]()
    of = (lambda model: [parameter.data for parameter in model.parameters()]) if name == "plain" else _inner
    expected = [tensor.clone() for tensor in of(model)]
    assert not any(tensor.is_pinned() for tensor in of(model))
    qf.keep_host_copies(model, pin=True)
    for _ in range(2):
        model.to(gpu.devices[0])
        model.to("cpu")
        assert all(tensor.is_pinned() for tensor in of(model))
    assert all(map(torch.equal, of(model), expected))


def test_a_pinned_move_that_fails_midway(gpu):
    """What did not move has the memory that it had."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    theirs = model[1].weight.data
    qf.keep_host_copies(model, pin=True)

    def fail(*args, **kwargs):
        raise MemoryError

    model[1]._apply = fail
    with pytest.raises(MemoryError):
        model.to(gpu.devices[0])
    assert model[0].weight.device == torch.device(gpu.devices[0])
    assert model[1].weight.data_ptr() == theirs.data_ptr()
    del model[1]._apply
    expected = theirs.clone()
    model.to(gpu.devices[0]).to("cpu")
    assert torch.equal(model[1].weight, expected)


def test_a_class_that_cannot_be_changed(gpu):
    class Fixed(type):
        def __setattr__(cls, name, value):
            raise TypeError(f"{name} stays")

    import torch

    class Model(torch.nn.Linear, metaclass=Fixed):
        pass

    model = Model(2, 2)
    before = set(vars(model))
    with pytest.raises(TypeError, match="_apply stays"):
        qf.keep_host_copies(model)
    assert set(vars(model)) == before


def test_where_a_move_replaces_each_parameter(gpu):
    import torch

    model = torch.nn.Linear(64, 64)
    qf.keep_host_copies(model)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(gpu.devices[0])
        held = model.weight
        model.to("cpu")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert held.device == torch.device(gpu.devices[0])
    assert torch.equal(held.cpu(), model.weight)


def test_another_type_and_a_second_device(gpu):
    import torch

    one, other = gpu.pair
    model = torch.nn.Linear(8, 8)
    expected = _state(model)
    qf.keep_host_copies(model)
    model.to(one).to(other).to("cpu")
    assert _same(_state(model), expected)
    model.to(one, torch.float64).to("cpu", torch.float32)
    assert _same(_state(model), expected)
    model.to(one).to("cpu", torch.float64)
    assert model.weight.dtype == torch.float64


def test_a_move_that_fails_midway_leaves_everything_movable(gpu):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    expected = _state(model)
    qf.keep_host_copies(model)
    calls = []

    def fails(tensor):
        if tensor.numel():
            calls.append(tensor)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return tensor.to(gpu.devices[0])

    with pytest.raises(RuntimeError, match="out of memory"):
        model._apply(fails)
    del calls[:]
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "cuda"}
    model.to("cpu")
    assert _same(_state(model), expected)


def test_copies_are_seen_by_audit_and_freed_by_release(gpu):
    import torch

    model = torch.nn.Linear(64, 64)
    qf.keep_host_copies(model)
    model.to(gpu.devices[0])
    of_cpu = qf.audit(model).bytes["cpu"]
    assert of_cpu == sum(parameter.nbytes for parameter in model.parameters())
    report = qf.release(model)
    assert not report.survivors
    assert report.freed["cpu"] == of_cpu


def test_a_deep_copy_and_a_pickle_move_as_upstream_does(gpu):
    import torch

    model = torch.nn.Linear(8, 8)
    qf.keep_host_copies(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.to(gpu.devices[0])
        assert other.weight.device == gpu.devices[0]
        assert model.weight.device.type == "cpu"
        copy.deepcopy(other).to("cpu")
        assert other.weight.device == gpu.devices[0]


def test_without_memory_for_the_copies_it_is_refused(gpu, monkeypatch, tmp_path):
    import torch

    from diffusers_quantfix.weights import host_memory

    model = torch.nn.Linear(64, 64).to(gpu.devices[0])
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "meminfo")
    with pytest.raises(MemoryError, match=r"need 0\.0 GB on the CPU.*leave out keep_host_copies"):
        qf.keep_host_copies(model)
    assert vars(model).keys() == vars(torch.nn.Linear(1, 1)).keys() and "_apply" not in vars(torch.nn.Linear)


def test_what_is_no_pipeline_or_released_is_refused():
    import torch

    with pytest.raises(TypeError, match="keep_host_copies"):
        qf.keep_host_copies(3)
    model = torch.nn.Linear(2, 2)
    qf.release(model)
    with pytest.raises(RuntimeError, match="was released"):
        qf.keep_host_copies(model)


# Around a row of words and a part of rows; 3 bytes are less than one word.
@pytest.mark.parametrize("count", [1, 3, 4, 4099, 1 << 15, (1 << 15) + 4, (1 << 21) + 5])
def test_a_checksum_depends_on_every_bit_and_on_its_place(count):
    import random

    import torch

    from diffusers_quantfix.weights.host_memory import fingerprint, random_numbers

    numbers = random_numbers(torch.device("cpu"))
    assert numbers.nbytes < 1 << 17, "they are made anew for each layer"
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    of_data, choice = int(fingerprint(data, numbers)), random.Random(0)
    for place in {0, count - 1, count // 2, *(choice.randrange(count) for _ in range(20))}:
        other = data.clone()
        other[place] ^= 1 << choice.randrange(8)
        assert int(fingerprint(other, numbers)) != of_data
    for length in (1, 4, 1 << 15):  # a byte, a word, a row, exchanged with the next one
        if 2 * length <= count:
            swapped = torch.cat((data[length : 2 * length], data[:length], data[2 * length :]))
            assert torch.equal(swapped, data) or int(fingerprint(swapped, numbers)) != of_data


def test_a_backup_on_the_cpu_stays_a_backup(gpu):
    """Before: the weights came back as the very memory that the backup has, and a change of them changed it."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.register_buffer("table", torch.arange(8.0))

    model = Layer()
    wanted, backup, table = _state(model), model.state_dict(), model.table
    qf.keep_host_copies(model)
    for _ in range(2):
        model.to(gpu.devices[0])
        model.to("cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    assert torch.equal(table, wanted["table"])
    model.load_state_dict(backup)
    assert _same(_state(model), wanted)


@pytest.mark.parametrize("holder", ["untyped_storage", "storage", "numpy", "__dlpack__"])
def test_memory_that_somebody_has_is_not_taken_back(gpu, holder):
    import torch

    model = torch.nn.Linear(8, 8)
    qf.keep_host_copies(model)
    held = getattr(model.weight.detach(), holder)()
    memory = model.weight.data_ptr()
    model.to(gpu.devices[0])
    model.to("cpu")
    assert model.weight.data_ptr() != memory
    del held
    memory = model.weight.data_ptr()
    for _ in range(2):
        model.to(gpu.devices[0])
        model.to("cpu")
        assert model.weight.data_ptr() == memory


def test_weights_that_are_mapped_from_a_file_do_not_follow_it(gpu, tmp_path):
    """Another program overwrites the file while they are on the device."""
    import torch
    from diffusers import FluxTransformer2DModel

    device = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path)
    model = FluxTransformer2DModel.from_pretrained(folder)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    qf.keep_host_copies(model)
    model.to(device)
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 3)
        opened.write(bytes(file.stat().st_size // 2))
    addresses = set()
    for _ in range(2):
        model.to("cpu")
        differ = [
            name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])
        ]
        assert not differ
        addresses.add(tuple(parameter.data_ptr() for parameter in model.parameters()))
        model.to(device)
    assert len(addresses) == 1, "the copies were not kept"


def test_a_small_part_of_a_mapped_file_is_copied_back(gpu, tmp_path):
    """The whole file would come into memory."""
    import torch

    device = gpu.devices[0]
    torch.save(torch.ones(1 << 20), tmp_path / "file")
    module = torch.nn.Module()
    module.part = torch.nn.Parameter(torch.load(tmp_path / "file", mmap=True)[:1000])
    qf.keep_host_copies(module)
    for _ in range(2):
        module.to(device)
        module.to("cpu")
        assert module.part.untyped_storage().nbytes() <= 1 << 20
        assert torch.equal(module.part, torch.ones(1000))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
@pytest.mark.parametrize("name", ["plain", "with a space", "with a\rreturn", "with a\nnewline"])
def test_which_memory_is_that_of_a_file(tmp_path, name):
    import torch

    from diffusers_quantfix.weights.host_memory import MappedFiles

    torch.save(torch.ones(1 << 16), tmp_path / name)
    mapped = torch.load(tmp_path / name, mmap=True)
    own = torch.ones(1 << 22)
    files = MappedFiles()
    assert files.hold(mapped.data_ptr())
    assert files.hold(mapped.data_ptr() + mapped.nbytes - 1)
    assert not files.hold(own.data_ptr())


def test_a_shallow_copy_moves_itself(gpu):
    """Before: `.to()` of the copy moved the model that it was made of, and returned that."""
    import gc

    import torch

    here, model = gpu.devices[0], torch.nn.Linear(8, 8)
    qf.keep_host_copies(model)
    other = copy.copy(model)
    other._parameters = {
        name: torch.nn.Parameter(one.detach().clone()) for name, one in model._parameters.items()
    }
    assert other.to(here) is other
    assert (other.weight.device, model.weight.device.type) == (here, "cpu")
    replica = model.to(here)._replicate_for_data_parallel()
    replica.weight = model.weight.detach()
    assert replica.cpu() is replica and model.weight.device == here
    assert model.to("cpu") is model
    del model
    gc.collect()
    assert other.to("cpu") is other and other.weight.device.type == "cpu"


def test_a_sparse_buffer_is_moved_as_upstream_does(gpu):
    """Before: RuntimeError after the move."""
    import torch

    for sparse in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()):
        model = torch.nn.Linear(4, 4)
        model.register_buffer("mask", sparse)
        qf.keep_host_copies(model)
        try:
            sparse.to(gpu.devices[0])
        except (NotImplementedError, RuntimeError):
            pytest.skip("these devices have no sparse tensors")
        model.to(gpu.devices[0])
        assert model.mask.device == gpu.devices[0]
        model.to("cpu")


def test_the_class_is_as_it_was_once_nothing_is_kept():
    import torch

    class Own(torch.nn.Linear):
        def _apply(self, fn, recurse=True):
            return super()._apply(fn, recurse)

    for cls in (torch.nn.Linear, Own):
        before = dict(vars(cls))
        one, other = cls(2, 2), cls(2, 2)
        qf.keep_host_copies(one)
        qf.keep_host_copies(other)
        qf.keep_host_copies(one, keep=False)
        assert other.to(torch.float64).weight.dtype == torch.float64
        qf.keep_host_copies(other, keep=False)
        assert dict(vars(cls)) == before


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("short", ["random_numbers", "_pin", "_held_by_others"])
def test_without_memory_for_copies_the_weights_move_as_upstream(rig_devices, monkeypatch, short, error):
    import torch

    from diffusers_quantfix.memory import host_copies

    model = torch.nn.Linear(64, 64)
    expected = _state(model)
    qf.keep_host_copies(model, pin=True)

    def fail(*args):
        raise error("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(host_copies, short, fail)
        for place in (rig_devices.devices[0], "cpu", rig_devices.devices[1]):
            model.to(place)
            assert model.weight.device == torch.device(place)
    model.to("cpu")
    assert _same(_state(model), expected)
