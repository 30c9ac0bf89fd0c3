"""Models quantized by optimum-quanto under group offloading."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    BLOCK,
    FEATURES,
    LEAF,
    SHOWS,
    STREAM,
    assert_can_be_moved,
    assert_exchanged_is_moved,
    assert_left,
    assert_works,
    assert_works_in_every_mode,
    modes,
    net,
    offload,
    stop,
)
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
quanto = quanto_models.quanto()

weights = pytest.mark.parametrize("weights", ["qint8", "qint4", "qfloat8"])


def build(weights: str, device, dtype=torch.float32, features: int = FEATURES):
    """A small model with these weights, quantized on the CPU, on ``device``."""

    def linear(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(features, features, dtype=dtype)

    model = net(linear)
    quanto.quantize(model, weights=getattr(quanto, weights))
    quanto.freeze(model)
    return model.to(device)


def run(model, device):
    inputs = torch.randn(32, model.first.in_features, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(inputs.to(device, model.first.bias.dtype)).cpu()


def inner_tensors(model):
    """All tensors of which the weights consist, by their device."""
    found = []
    pending = list(model.parameters())
    while pending:
        tensor = pending.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            pending.extend(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        found.append(tensor)
    return found


def places_of(model) -> set[str]:
    return {str(tensor.device) for tensor in inner_tensors(model)}


@pytest.mark.defect("diffusers-group-offload-quanto", shows=SHOWS)
@weights
@modes("leaf", "leaf-stream", "block-low")
def test_quantized_layers(gpu, weights, mode):
    device = gpu.devices[0]
    assert_works(gpu, device, lambda: build(weights, device), lambda model: run(model, device), mode)


@weights
@modes()
def test_every_mode_from_the_cpu_to_the_second_device(gpu, weights, mode):
    device = gpu.devices[-1]
    expected = run(build(weights, device), device)
    before = gpu.allocated(device)
    model = build(weights, "cpu")
    offload(model, device, mode)
    for _ in range(3):
        assert torch.equal(run(model, device), expected)
        assert gpu.allocated(device) == before


@weights
@modes("leaf-stream", "leaf-low")
def test_every_byte_travels_once_and_one_way(rig_devices, weights, mode):
    device = rig_devices.devices[0]
    model = build(weights, device)
    rig_devices.reset()
    run(model, device)
    unmoved = rig_devices.traffic()
    size = sum(tensor.nbytes for tensor in inner_tensors(model) if not hasattr(tensor, "__tensor_flatten__"))
    size += sum(buffer.nbytes for buffer in model.buffers())
    offload(model, device, mode)
    run(model, device)
    rig_devices.reset()
    run(model, device)
    assert rig_devices.overlapping() == size
    assert rig_devices.traffic().h2d == size + unmoved.h2d
    assert rig_devices.traffic().d2h == unmoved.d2h


@weights
@modes("leaf", "block-stream")
def test_models_can_be_moved_when_the_hooks_are_off(gpu, weights, mode):
    assert_can_be_moved(gpu.pair, build(weights, gpu.pair[0]), run, mode, places_of)


@modes("leaf", "block", "leaf-stream", "leaf-low", "block-record")
def test_int4_in_bfloat16_which_is_packed_for_the_kernel_of_the_device(gpu, mode):
    """On the CPU in another way than on a GPU, and before optimum-quanto 0.2.7 not at all."""
    if torch.version.cuda is None and (sentence := unmet("optimum-quanto>=0.2.6")):
        pytest.skip(f"on a GPU it asks for the CUDA of torch, and the rig's is built without; {sentence}")
    device = gpu.devices[0]
    reference = build("qint4", device, torch.bfloat16, features=256)
    expected = run(reference, device)
    on_cpu = build("qint4", "cpu", torch.bfloat16, features=256)
    state = {name: tensor.clone() for name, tensor in on_cpu.state_dict().items()}
    at_home = run(on_cpu, "cpu")
    on_cpu.first.weight.mark = "kept"
    parameters = dict(on_cpu.named_parameters())
    before = gpu.allocated(device)
    offload(on_cpu, device, mode)
    for _ in range(3):
        # Not equal: a GPU that has a kernel for it sums up in another order than the plain weights.
        assert quanto_models.error(run(on_cpu, device), expected) < 0.02
        assert_left(gpu, device, before)
    if type(reference.first.weight) is quanto.WeightQBitsTensor:
        assert torch.equal(run(on_cpu, device), expected)
    assert dict(on_cpu.named_parameters()).keys() == parameters.keys()
    assert all(parameters[name] is parameter for name, parameter in on_cpu.named_parameters())
    assert isinstance(on_cpu.first.weight, torch.nn.Parameter) and on_cpu.first.weight.mark == "kept"
    after = on_cpu.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(after[name], state[name]) for name in state)
    stop(on_cpu)
    assert quanto_models.error(run(on_cpu, "cpu"), at_home) < 0.02
    assert torch.equal(run(on_cpu.to(device), device), expected)


@pytest.mark.parametrize("weights", ["qint8", "qfloat8"])
@pytest.mark.parametrize("made_in_it", [False, True], ids=["", "made in it"])
@modes("leaf", "leaf-stream", "block-low")
def test_in_inference_mode_and_out_of_it(gpu, weights, mode, made_in_it):
    """Not int4: its plain layers cannot run in inference mode, offloaded or not."""
    device = gpu.devices[0]
    assert_works_in_every_mode(
        gpu,
        device,
        lambda: build(weights, "cpu").to(device),
        lambda model: run(model, device),
        mode,
        made_in_it,
    )


@weights
@pytest.mark.parametrize("other", ["qint8", "qint4"])
@modes("leaf", "block", "leaf-stream", "block-low")
def test_what_is_exchanged_between_two_passes_is_moved(gpu, weights, other, mode):
    """Another weight in a layer, with as many inner tensors or not."""
    device = gpu.devices[0]

    def exchange(model):
        layer = model.blocks[0][0]
        source = build(other, layer.weight._data.device).blocks[1][2]
        layer.weight, layer.weight_qtype = source.weight, source.weight_qtype

    assert_exchanged_is_moved(
        gpu, device, lambda where: build(weights, where), lambda model: run(model, device), mode, exchange
    )


@pytest.mark.parametrize("level", [LEAF, BLOCK | STREAM], ids=["leaf", "block-stream"])
def test_disk_is_refused_in_a_sentence(gpu, tmp_path, level):
    model = build("qint8", "cpu")
    with pytest.raises(ValueError, match="QBytesTensor cannot be offloaded to disk"):
        offload(model, gpu.devices[0], level | {"offload_to_disk_path": str(tmp_path)})
