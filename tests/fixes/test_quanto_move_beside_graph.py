"""quanto-move-beside-graph: a model with weights of quanto is moved while a graph is alive."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

FIX_ID = "quanto-move-beside-graph"
SHOWS = "Couldn't swap QLinear.weight"


def frozen(qtype: str):
    """Two layers without gradients for the weights, as diffusers loads them: ``quanto.freeze`` leaves them on."""
    return q.layers(qtype).requires_grad_(False)


def with_graph(model, device):
    """An input that asks for a gradient, and the sum of the outputs for it."""
    inputs = q.inputs(device=device).requires_grad_(True)
    return inputs, model(inputs).float().sum()


def parts(model):
    """The inner tensors of all weights."""
    return [getattr(layer.weight, name) for layer in model for name in ("_data", "_scale")]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("qtype", ["qint8", "qfloat8", "qint4"])
@pytest.mark.parametrize("spelling", ["to", "cpu"])
def test_it_is_moved(gpu, qtype, spelling):
    import torch

    device = gpu.devices[0]
    model = frozen(qtype).to(device)
    expected = frozen(qtype).to(device)
    inputs, loss = with_graph(model, device)
    kinds = [type(layer.weight) for layer in model]
    {"to": lambda: model.to("cpu"), "cpu": model.cpu}[spelling]()
    assert all(layer.weight.device.type == "cpu" for layer in model)
    if qtype != "qint4":  # packed otherwise on another device
        assert [type(layer.weight) for layer in model] == kinds
        assert all(part.device.type == "cpu" for part in parts(model))
    loss.backward()
    others, other_loss = with_graph(expected, device)
    other_loss.backward()
    assert torch.equal(inputs.grad, others.grad)
    assert torch.equal(model(q.inputs()), expected.to("cpu")(q.inputs()))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_device_is_left_with_the_graph(gpu):
    device = gpu.devices[0]
    before = gpu.allocated(device)
    model = frozen("qint8").to(device)
    graph = with_graph(model, device)
    model.to("cpu")
    del graph
    assert gpu.allocated(device) == before
    model.to(device)
    assert with_graph(model, device)[1].device == device


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_layers_that_share_a_weight_still_do(gpu):
    import torch

    device = gpu.devices[0]
    one, other = frozen("qint8")[0], frozen("qint8")[0]
    other.weight = one.weight
    model = torch.nn.Sequential(one, other).to(device)
    graph = with_graph(model, device)
    model.to("cpu")
    assert one.weight is other.weight
    assert graph[1].device == device


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_interrupted_move_loses_nothing(gpu):
    import torch

    device = gpu.devices[0]
    model = frozen("qint8").to(device)
    given = q.inputs(device=device)
    expected = model(given).detach()
    graph = with_graph(model, device)

    def no_memory(tensor):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        model._apply(no_memory)
    assert torch.equal(model(given), expected)
    model.to("cpu")
    assert graph[1].device == device
    assert all(part.device.type == "cpu" for part in parts(model))


def test_without_a_graph_the_parameter_stays_the_same(gpu):
    model = q.layers("qint8")
    weights = [layer.weight for layer in model]
    model.to(gpu.devices[0])
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_gradient_of_a_weight_is_passed_on(gpu):
    import torch

    device = gpu.devices[0]
    model, expected = (frozen("qint8").to(device) for _ in range(2))
    for layer in (*model, *expected):  # the biases are plain: torch itself raises where they have moved
        layer.weight.requires_grad_(True)
    for turn in range(2):  # the second adds to the first
        _, other = with_graph(expected, device)
        other.backward()
        _, loss = with_graph(model, device)
        _, earlier = with_graph(model, device)
        model.to("cpu")
        if turn == 0:
            loss.backward()
        else:
            earlier.backward()
        assert torch.equal(model[0].weight.grad.cpu(), expected[0].weight.grad.cpu())
        model.to(device)
    assert model[0].weight.grad.device == device


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_model_offload_with_gradients(gpu):
    """As in Attend and Excite: the hook of a model moves it back while its outputs are alive."""
    import torch
    from accelerate import cpu_offload_with_hook

    device = gpu.devices[0]
    model, expected = frozen("qint8"), frozen("qint8").to(device)
    model, hook = cpu_offload_with_hook(model, device)
    inputs, loss = with_graph(model, device)
    hook.offload()
    assert all(part.device.type == "cpu" for part in parts(model))
    others, other_loss = with_graph(expected, device)
    other_loss.backward()
    loss.backward()
    assert torch.equal(inputs.grad, others.grad)
    assert torch.equal(model(q.inputs(device=device)), expected(q.inputs(device=device)))
