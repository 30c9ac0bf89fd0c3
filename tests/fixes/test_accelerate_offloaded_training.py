"""accelerate-offloaded-training: training under sequential offload changes nothing."""

from __future__ import annotations

import warnings

import pytest

from tests.fixes.callers import spelled
from tests.fixes.callers import spelling as spelling
from tests.rig import models

torch = pytest.importorskip("torch")

FIX_ID = "accelerate-offloaded-training"
SHOWS = "DID NOT RAISE"
REFUSED = r"no gradient reaches them .* call `eval\(\)` on it"


class Layers(torch.nn.Module):
    """Two layers, the first of which is trained; its output is what a library's model returns."""

    def __init__(self, returned=lambda tensor: tensor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64).requires_grad_(False)
        self.returned = returned

    def forward(self, x):
        return self.returned(self.second(self.first(x)))


def offloaded(device, model=None, way: str = "cpu_offload", folder=None):
    import accelerate

    model = Layers() if model is None else model
    if way == "cpu_offload":
        return accelerate.cpu_offload(model, spelled(device))
    if way == "disk_offload":
        return accelerate.disk_offload(model, folder, spelled(device))
    return accelerate.dispatch_model(model, {"first": "cpu", "second": 0}, main_device=0)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_training_step_is_refused(gpu, way, tmp_path):
    model = offloaded(gpu.devices[0], way=way, folder=tmp_path)
    inputs = torch.ones(2, 64)
    before = model(inputs).detach()
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            model(inputs).sum().backward()
    assert torch.equal(model(inputs), before)


@pytest.mark.parametrize(
    "returned",
    [lambda t: (t,), lambda t: {"sample": t}, lambda t: [{"a": (t, 1)}]],
    ids=["tuple", "dict", "nested"],
)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_whatever_the_output_is(gpu, returned):
    output = offloaded(gpu.devices[0], Layers(returned))(torch.ones(2, 64))
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    with pytest.raises(ValueError, match=REFUSED):
        output.sum().backward()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.42", "peft"))
def test_a_lora(gpu, checkpointing):
    """That of quantized models: `tests.sweep.test_training`."""
    from tests.sweep import test_training as training

    device = gpu.devices[0]
    model = training.with_lora(models.flux_transformer())
    pipe = models.flux_pipeline(model)
    pipe.enable_sequential_cpu_offload(device=spelled(device))
    if checkpointing:
        model.enable_gradient_checkpointing()
    with pytest.raises(ValueError, match=REFUSED):
        training.gradients(model, device)


def test_gradients_of_the_inputs_are_given(gpu):
    """Without a word in evaluation mode, in which models are loaded; a layer that is made in training mode, as a LoRA
    is, or a soft prompt before a model in training mode is warned of."""
    device = gpu.devices[0]
    inputs = torch.ones(2, 64, requires_grad=True)
    Layers()(inputs).sum().backward()
    expected, inputs.grad = inputs.grad, None
    model = offloaded(device).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, expected)
    for trained in (model.first, model):
        inputs.grad = None
        trained.train()
        with pytest.warns(UserWarning, match="no gradient reaches them"):
            model(inputs).sum().backward()
        torch.testing.assert_close(inputs.grad, expected)


def test_a_weight_that_is_not_offloaded_is_trained(gpu):
    """With a warning that the others are not."""
    from accelerate import dispatch_model

    model = Layers()
    model.second.requires_grad_(True)
    dispatch_model(model, {"first": "cpu", "second": 0}, main_device=0)
    with pytest.warns(UserWarning, match="to train them, do not offload them"):
        model(torch.ones(2, 64)).sum().backward()
    assert model.second.weight.grad is not None


def test_frozen_weights_may_be_offloaded(gpu):
    """No warning where what is trained is on a device."""
    from accelerate import dispatch_model

    model = dispatch_model(Layers(), {"first": 0, "second": "cpu"}, main_device=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 64)).sum().backward()
    assert model.first.weight.grad is not None


def test_no_gradients_no_words(gpu):
    model = offloaded(gpu.devices[0])
    with torch.no_grad():
        assert not model(torch.ones(2, 64)).requires_grad
    with torch.inference_mode():
        model(torch.ones(2, 64))
