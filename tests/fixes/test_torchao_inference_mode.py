"""torchao-inference-mode: in inference mode torchao models cannot be moved or offloaded, or stay on the GPU."""

from __future__ import annotations

import pytest

from tests.fixes import torchao_models as ao
from tests.fixes.callers import interrupt, spelled
from tests.fixes.callers import spelling as spelling
from tests.gate import unmet
from tests.pipelines.backends import BACKENDS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    bool(unmet("torchao>=0.15")), reason="torchao moves its tensors in another way"
)

FIX_ID = "torchao-inference-mode"
SHOWS = (
    "Attempted to set the storage of a tensor on device|reports where it is not|Couldn't swap"
    r"|unimplemented operator/function: func=<OpOverload\(op='aten\.(to|_has_compatible_shallow_copy_type)'"
)
each_kind = pytest.mark.parametrize("weights", ao.WEIGHTS)


def memory(weight) -> int:
    """The address of the packed numbers."""
    while hasattr(weight, "__tensor_flatten__"):
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])
    return weight.data_ptr()


def assert_is_on(model, device) -> None:
    assert ao.devices_of(model) == {str(device)}, "a weight reports where it is not"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_to_meta():
    with torch.inference_mode():
        assert_is_on(ao.layers("float8").to("meta"), "meta")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@each_kind
def test_there_and_back(gpu, weights):
    device = gpu.devices[0]
    model, before = ao.layers(weights), gpu.allocated(device)
    expected = ao.run(model)
    on_device = ao.run(ao.layers(weights, device), device)
    with torch.inference_mode():
        for _ in range(2):
            model.to(spelled(device))
            assert_is_on(model, device)
            assert torch.equal(ao.run(model, device), on_device)
            model.cpu()
            assert_is_on(model, "cpu")
            assert torch.equal(ao.run(model), expected)
            assert gpu.allocated(device) == before
    # And on, out of inference mode.
    assert torch.equal(ao.run(model), expected)
    model.to(device)
    assert_is_on(model, device)
    assert torch.equal(ao.run(model, device), on_device)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torchao>=0.18")
@each_kind
def test_a_tensor_that_is_not_moved_shares_its_memory(gpu, weights):
    weight = ao.layers(weights, gpu.devices[0])[0].weight
    with torch.inference_mode():
        for same in (weight.to(weight.device), weight.to(spelled(gpu.devices[0])), weight.to(weight.dtype)):
            assert same.device == weight.device
            assert memory(same) == memory(weight)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_the_default_classes(gpu, config):
    """Before torchao 0.18 others than the tests elsewhere ask for."""
    quantization = pytest.importorskip("torchao.quantization")
    device = gpu.devices[0]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    quantization.quantize_(model, getattr(quantization, config)())
    expected = ao.run(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            model.to(spelled(device))
            assert {weight.device for weight in model.parameters()} == {device}, "it reports where it is not"
            ao.run(model, device)
            model.to("cpu")
            assert torch.equal(ao.run(model), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@each_kind
def test_a_model_that_is_there_already(gpu, weights):
    device = gpu.devices[0]
    model = ao.layers(weights, device)
    expected, before = ao.run(model, device), gpu.allocated(device)
    try:
        with torch.inference_mode():
            ao.run(model, device)
    except RuntimeError as error:  # float8 of torchao 0.15
        pytest.skip(f"not moved either: {error}")
    with torch.inference_mode():
        for where in (spelled(device), device, torch.bfloat16):
            model.to(where)
            assert_is_on(model, device)
            assert torch.equal(ao.run(model, device), expected)
        assert memory(model[0].weight.detach()) == memory(model[0].weight)
    assert torch.equal(ao.run(model, device), expected)
    assert gpu.allocated(device) == before


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@each_kind
def test_model_offload(gpu, weights):
    from accelerate import cpu_offload_with_hook

    device = gpu.devices[0]
    expected, before = ao.run(ao.layers(weights, device), device), gpu.allocated(device)
    model, hook = cpu_offload_with_hook(ao.layers(weights), spelled(device))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for part in (0, 0.2, 0.5):
            with mode():
                if part:
                    interrupt(lambda: ao.run(model), part)
                assert torch.equal(ao.run(model), expected)
                assert_is_on(model, device)
                hook.offload()
                assert_is_on(model, "cpu")
                assert gpu.allocated(device) == before


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torchao>=0.18")
@each_kind
def test_sequential_offload(gpu, weights):
    from accelerate import cpu_offload

    device = gpu.devices[0]
    expected, before = ao.run(ao.layers(weights, device), device), gpu.allocated(device)
    model = ao.layers(weights)
    cpu_offload(model, spelled(device))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ao.run(model), expected)
        assert gpu.allocated(device) == before


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_another_dtype(gpu):
    """As out of inference mode, also on another device; float8 weights cannot be converted in either."""
    device = gpu.devices[0]
    outcomes = []
    for mode in (torch.no_grad, torch.inference_mode):
        model = ao.layers("int8")
        with mode():
            model.to(spelled(device), torch.float16)
            assert_is_on(model, device)
            output = model(torch.ones(2, 64, dtype=torch.float16, device=device))
        outcomes.append((model[0].weight.dtype, model[0].bias.dtype, output.dtype, output.cpu()))
    assert outcomes[0][:3] == outcomes[1][:3]
    assert torch.equal(outcomes[0][3], outcomes[1][3])


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
def test_a_pipeline(gpu, tmp_path):
    """Of which each component is on the device for its own part only."""
    import diffusers

    torch.manual_seed(0)
    diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_pretrained(tmp_path)  # fmt: skip
    unet = diffusers.UNet2DModel.from_pretrained(
        tmp_path, torch_dtype=torch.float32, quantization_config=BACKENDS["torchao-int8"]("diffusers")
    )
    pipe = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def run():
        with torch.inference_mode():
            return pipe(
                num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
            ).images

    device = gpu.devices[0]
    pipe.to(device)
    expected = run()
    pipe.to("cpu")
    before = gpu.allocated(device)
    pipe.enable_model_cpu_offload(device=spelled(device))
    for _ in range(2):
        assert (run() == expected).all()
        pipe.maybe_free_model_hooks()  # as most pipelines do at the end
        assert_is_on(pipe.unet, "cpu")
        assert gpu.allocated(device) <= before


def test_the_probe_adds_no_class_to_those_of_torchao():
    """`torchao-load-map` goes through them."""
    from diffusers_quantfix.fixes.torchao import inference_mode

    utils = pytest.importorskip("torchao.utils")
    inference_mode.broken(utils)
    ours = inference_mode.__name__.partition(".")[0]
    assert not [
        cls for cls in utils.TorchAOBaseTensor.__subclasses__() if cls.__module__.partition(".")[0] == ours
    ]
