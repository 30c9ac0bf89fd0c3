"""accelerate-quanto-offload: models with weights of quanto cannot be offloaded sequentially."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import quanto_models as q
from tests.fixes.callers import interrupt, spelled
from tests.fixes.callers import spelling as spelling

FIX_ID = "accelerate-quanto-offload"
SHOWS = r"__new__\(\) missing \d required positional arguments: 'axis'"


def offload(model, device="cpu", **options):
    from accelerate import cpu_offload

    return cpu_offload(model, spelled(device), **options)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_offloaded_model_gives_the_same_numbers():
    import torch
    from accelerate.hooks import remove_hook_from_module

    for qtype in q.QTYPES:
        model = q.layers(qtype)
        kind, reference = type(model[0].weight), q.run(model)
        offload(model)
        for _ in range(2):
            assert model[0].weight.is_meta and model[0].bias.is_meta, "a weight is not offloaded"
            assert torch.equal(q.run(model), reference), qtype
        remove_hook_from_module(model, recurse=True)
        assert type(model[0].weight) is kind and not model[0].weight.is_meta
        assert torch.equal(q.run(model), reference), f"{qtype} without hooks"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_on_a_gpu_nothing_stays(gpu):
    device = gpu.devices[0]
    reference = q.run(q.layers("qint8"))
    model = offload(q.layers("qint8"), device)
    gpu.reset()
    before = gpu.allocated(device)
    assert q.error(q.run(model, device=device), reference) < 1e-5
    assert model[0].weight.is_meta
    assert gpu.allocated(device) == before, "weights stay on the device"


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_after_an_interrupted_run(gpu, inference):
    import torch

    device = gpu.devices[0]
    reference = q.run(q.layers("qint8").to(device), device=device)
    model = offload(q.layers("qint8"), device)
    before = gpu.allocated(device)
    for part in (0.3, 0.6, 0.9):
        with torch.inference_mode(inference):
            interrupt(lambda: q.run(model, device=device), part)
            assert torch.equal(q.run(model, device=device), reference)
        assert torch.equal(q.run(model, device=device), reference)
        assert gpu.allocated(device) == before, "weights stay on the device"


def test_only_the_weights_travel_and_only_there(rig_devices):
    """An int8 layer of 256 x 256: data, scales and bias go to the device once per use; nothing travels back."""
    import torch

    device = rig_devices.devices[0]
    model = offload(q.layers("qint8"), device)
    given = q.inputs(device=device)
    rig_devices.reset()
    with torch.no_grad():
        model(given)
    weights = 256 * 256 + 256 * 128 + 2 * 4 * (256 + 128)
    assert weights <= rig_devices.traffic().h2d < 1.02 * weights
    assert rig_devices.traffic().d2h == 0


def test_the_host_copy_is_no_second_one():
    """The weights map holds the parts of the state dict; the weight is put together from them, not copied."""
    model = q.layers("qfloat8")
    data = model[0].weight._data.data_ptr()
    offload(model)
    held = model[0]._hf_hook.weights_map["weight"]
    assert held._data.data_ptr() == data
    assert model[0]._hf_hook.weights_map.get("no such name") is None
    assert "0.weight._data" in set(model[0]._hf_hook.weights_map.dataset)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    """Bit-equal but for tinygemm (int4 in bfloat16, from 0.2.7 on), whose packing a state dict does not have."""
    import torch

    dtype = getattr(torch, dtype)
    for qtype in q.QTYPES:
        model = q.layers(qtype, dtype)
        tinygemm = type(model[0].weight).__name__.startswith("Tiny")
        reference = q.run(model, dtype)
        off = q.error(q.run(offload(model), dtype), reference)
        assert off < 0.02 if tinygemm else off == 0, (qtype, off)


@pytest.mark.parametrize("qtype", ["qint8", "qint4", "qint2"])
def test_offload_to_disk(tmp_path, qtype):
    """Not with float8, which older releases of accelerate cannot write."""
    import torch
    from accelerate import disk_offload

    model = q.layers(qtype)
    reference = q.run(model)
    disk_offload(model, tmp_path, torch.device("cpu"))
    assert model[0].weight.is_meta
    assert torch.equal(q.run(model), reference)


def test_offload_of_a_block_with_its_submodules():
    """``preload_module_classes``: one hook has the weights of all layers below."""
    import torch

    model = q.layers("qint4")
    reference = q.run(model)
    offload(model, preload_module_classes=["Sequential"])
    assert model[0].weight.is_meta and torch.equal(q.run(model), reference)


def test_the_state_dict_of_an_offloaded_model_has_its_data():
    import torch

    for qtype in q.QTYPES:
        model = q.layers(qtype)
        expected = copy.deepcopy(model).state_dict()
        found = offload(model).state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert not found[name].is_meta, name
            assert torch.equal(found[name].float(), tensor.float()), name


def test_a_hook_without_a_weights_map_and_plain_parameters():
    """The hook then keeps the weights themselves; and everything that is not quanto's goes upstream's way."""
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import set_module_tensor_to_device

    layer = q.layers("qint8")[0]
    reference = q.run(layer)
    add_hook_to_module(layer, AlignDevicesHook(torch.device("cpu"), offload=True))
    assert layer.weight.is_meta and torch.equal(q.run(layer), reference)
    plain = torch.nn.Linear(4, 4)
    set_module_tensor_to_device(plain, "weight", "meta")
    assert plain.weight.is_meta and type(plain.weight) is torch.nn.Parameter
    with pytest.raises(ValueError, match="is on the meta device, we need a `value`"):
        set_module_tensor_to_device(layer, "weight", "cpu")
    with pytest.raises(ValueError, match="does not have a parameter or a buffer"):
        set_module_tensor_to_device(q.layers("qint8")[0], "missing", "cpu")
