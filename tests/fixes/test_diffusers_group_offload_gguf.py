"""diffusers-group-offload-gguf: each move of a GGUF weight goes through its class, and is copied back for nothing."""

from __future__ import annotations

import pytest

from tests import rig
from tests.fixes import gguf_models
from tests.fixes.callers import interrupt
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    FEATURES,
    assert_can_be_moved,
    assert_exchanged_is_moved,
    assert_gives_gradients,
    assert_left,
    assert_works,
    assert_works_in_every_mode,
    modes,
    net,
    offload,
)
from tests.rig.fixtures import require_rig

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
gguf = pytest.importorskip("gguf")
utils = pytest.importorskip("diffusers.quantizers.gguf.utils")

FIX_ID = "diffusers-group-offload-gguf"
SHOWS = r"AssertionError: \d+ calls of __torch_function__|AssertionError: \d+ bytes were copied back"


class Weight(utils.GGUFParameter):
    """Counts the calls of its ``__torch_function__``."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Weight.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


def packed(seed: int, kind=utils.GGUFParameter):
    torch.manual_seed(seed)
    quant_type = gguf.GGMLQuantizationType.Q8_0
    data = torch.from_numpy(gguf.quants.quantize(torch.randn(FEATURES, FEATURES).numpy(), quant_type))
    return kind(data, quant_type=quant_type)


def linear(seed: int, kind=utils.GGUFParameter):
    layer = utils.GGUFLinear(FEATURES, FEATURES, bias=True, compute_dtype=torch.float32)
    layer.weight = packed(seed, kind)
    layer.bias.data.normal_(generator=torch.Generator().manual_seed(seed))
    return layer.requires_grad_(False)


def build(device, kind=utils.GGUFParameter):
    return net(lambda seed: linear(seed, kind)).to(device)


def inputs(device):
    return torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(7)).to(device)


def run(model, device):
    with torch.no_grad():
        return model(inputs(device)).cpu()


def places_of(model) -> set[str]:
    return {str(tensor.device) for tensor in model.parameters()}


@modes("leaf", "block", "leaf-stream", "block-stream", "leaf-low", "leaf-record")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_weight_is_moved_as_plain_memory(gpu, mode):
    device = gpu.devices[0]
    model = build("cpu")
    for layer in model.modules():
        if isinstance(layer, utils.GGUFLinear):
            layer.weight = Weight(layer.weight.as_tensor(), quant_type=layer.weight.quant_type)
    expected = run(model, "cpu")
    offload(model, device, mode)
    groups = [
        hook.group
        for module in model.modules()
        if (registry := getattr(module, "_diffusers_hook", None)) is not None
        and (hook := registry.get_hook("group_offloading")) is not None
    ]
    with torch.no_grad():
        for group in groups:
            group.onload_()
            group.offload_()
        Weight.calls = 0
        for group in groups:
            group.onload_()
            group.offload_()
    assert Weight.calls == 0, f"{Weight.calls} calls of __torch_function__"
    torch.testing.assert_close(run(model, device), expected)


@modes("leaf", "block")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_unchanged_weights_are_not_copied_back(gpu, mode):
    require_rig()
    device = gpu.devices[0]
    model = build("cpu")
    offload(model, device, mode)
    run(model, device)
    rig.reset()
    run(model, device)
    # the output, and the loose parameter, which diffusers moves
    back = rig.traffic(device).d2h - 3 * FEATURES * 4 - 4
    assert back <= 0, f"{back} bytes were copied back"


@modes()
def test_it_works_in_every_mode(gpu, mode):
    device = gpu.devices[0]
    assert_works(gpu, device, lambda: build(device), lambda model: run(model, device), mode)


@modes("leaf", "block-stream")
def test_it_works_in_inference_mode(gpu, mode):
    device = gpu.devices[0]
    assert_works_in_every_mode(gpu, device, lambda: build(device), lambda model: run(model, device), mode)


@modes("leaf", "leaf-stream", "block-low")
def test_it_gives_gradients(gpu, mode):
    device = gpu.devices[0]
    assert_gives_gradients(gpu, device, lambda: build(device), inputs(device), mode)


def another_weight(model):
    model.first.weight = packed(50).to(model.first.weight.device)


def other_bytes(model):
    """Written into the weight, as a state dict is loaded."""
    with torch.no_grad():
        model.first.weight.as_tensor().copy_(packed(50).as_tensor())


def other_data(model):
    model.first.weight.data = packed(50).as_tensor().to(model.first.weight.device)


@pytest.mark.parametrize("exchange", [another_weight, other_bytes, other_data])
@modes("leaf", "block", "leaf-stream", "leaf-low")
def test_what_is_exchanged_between_two_passes_is_moved(gpu, mode, exchange):
    device = gpu.devices[0]
    assert_exchanged_is_moved(gpu, device, build, lambda model: run(model, device), mode, exchange)


@modes("block")
def test_a_tensor_of_the_program_that_was_put_into_a_block_stays_where_it_is(gpu, mode):
    """Between two passes, as a part of the model or for one pass."""
    device = gpu.devices[0]

    class Conditioned(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block
            self.register_buffer("state", torch.zeros(FEATURES))

        def forward(self, x):
            return self.block(x) + self.state

    def conditioned(on):
        model = build(on)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = Conditioned(block).to(on)
        return model

    unmoved, model = conditioned(device), conditioned("cpu")
    offload(model, device, mode)
    states = [torch.full((FEATURES,), value, device=device) for value in (0.5, 0.25)]
    for state in (None, *states):
        if state is not None:
            model.blocks[0].state = unmoved.blocks[0].state = state
        for _ in range(2):
            assert torch.equal(run(model, device), run(unmoved, device))
        assert {state.device.type for state in states} == {"cuda"}
    with torch.no_grad():
        found, expected = (
            torch.func.functional_call(each, {"blocks.1.state": states[0]}, inputs(device))
            for each in (model, unmoved)
        )
    assert torch.equal(found, expected)
    assert states[0].device.type == "cuda"
    assert model.blocks[0].state.device.type == "cpu"


class Noting(torch.nn.Module):
    """Notes a view of its table, beside the weights of its block."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(2.0 * FEATURES).view(2, FEATURES))
        self.register_buffer("state", torch.zeros(FEATURES))

    def forward(self, x):
        self.state = self.table[0] * 2 if self.training else self.table[:1].reshape(-1)
        return x


@modes("block", "block-stream")
@pytest.mark.parametrize("training", [False, True], ids=["a view", "new"])
def test_what_came_into_a_block_is_on_its_device_for_who_has_it(gpu, mode, training):
    device = gpu.devices[0]
    model = build("cpu")
    model.blocks[0].append(Noting().train(training))
    offload(model, device, mode)
    kept = []
    model.blocks[0][-1].register_forward_hook(lambda module, args, output: kept.append(module.state))
    for _ in range(1 if "use_stream" in mode else 3):
        run(model, device)
    assert {state.device.type for state in kept} == {"cuda"}
    if "use_stream" in mode:
        assert model.blocks[0][-1].state is kept[-1]


@modes("block-stream")
def test_two_blocks_that_get_one_tensor(gpu, mode):
    device = gpu.devices[0]

    class Halving(torch.nn.Module):
        def __init__(self, halves):
            super().__init__()
            self.halves = halves
            self.register_buffer("state", torch.zeros(FEATURES))

        def forward(self, x):
            if self.halves:
                self.state.mul_(0.5)
            return x + self.state

    def halving(on):
        model = build(on)
        for block, halves in zip(model.blocks, (True, False), strict=True):
            block.append(Halving(halves).to(on))
        return model

    unmoved, model = halving(device), halving("cpu")
    offload(model, device, mode)
    run(model, device)
    run(unmoved, device)
    for each in (unmoved, model):
        each.blocks[0][-1].state = each.blocks[1][-1].state = torch.ones(FEATURES, device=device)
    for _ in range(4):
        assert torch.equal(run(model, device), run(unmoved, device))


@modes("block-stream")
@pytest.mark.parametrize("backend", ["GGUF", "none"])
@pytest.mark.parametrize("of", ["the program", "the block before"])
def test_a_tensor_that_is_put_into_a_block_that_is_fetched_already(gpu, mode, backend, of):
    """For the rest of a pass: that it came in is not seen before the group comes next, where it is gone again."""
    device = gpu.devices[0]

    class Adding(torch.nn.Module):
        def __init__(self, block, value):
            super().__init__()
            self.block = block
            self.register_buffer("state", torch.full((FEATURES,), value))

        def forward(self, x):
            return self.block(x) + self.state

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layers = [
                torch.nn.Linear(FEATURES, FEATURES) if backend == "none" else linear(seed)
                for seed in range(4)
            ]
            self.first = layers.pop()
            self.blocks = torch.nn.ModuleList(
                Adding(layer, 0.5 * number) for number, layer in enumerate(layers)
            )
            self.state = None

        def forward(self, x):
            x, last = self.first(x), self.blocks[2]
            before = last.state
            for block in self.blocks:
                if block is last and self.state is not None:
                    last.state = self.state if of == "the program" else self.blocks[1].state
                x = block(x)
            last.state = before
            return x

    unmoved, model = Model().to(device).eval(), Model().eval()
    offload(model, device, mode)
    state = torch.full((FEATURES,), 3.0, device=device)
    for number in range(5):
        if number == 2:
            unmoved.state = model.state = state
        assert torch.equal(run(model, device), run(unmoved, device))
        assert state.device.type == "cuda"


@modes("leaf-stream", "block-low")
def test_models_can_be_moved_when_the_hooks_are_off(gpu, mode):
    assert_can_be_moved(gpu.pair, build(gpu.pair[0]), run, mode, places_of)


@modes("leaf", "leaf-stream")
def test_a_model_from_a_file(gpu, tmp_path, mode):
    device = gpu.devices[0]
    expected = gguf_models.run(gguf_models.transformer(tmp_path).to(device), device)
    before = gpu.allocated(device)
    model = gguf_models.transformer(tmp_path)
    offload(model, device, mode)
    for _ in range(2):
        assert torch.equal(gguf_models.run(model, device), expected)
        assert_left(gpu, device, before)
    interrupt(lambda: gguf_models.run(model, device), 0.5)
    assert torch.equal(gguf_models.run(model, device), expected)
    assert_left(gpu, device, before)


class Sparse(torch.nn.Module):
    """Multiplies with its sparse buffer."""

    def __init__(self, layout):
        super().__init__()
        self.register_buffer("factors", torch.eye(FEATURES).to_sparse(layout=layout))

    def forward(self, x):
        return torch.sparse.mm(self.factors, x.t()).t()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@modes("leaf", "block")
def test_a_sparse_buffer_beside_the_weights(gpu, mode, layout):
    model = build("cpu")
    model.blocks[0].append(Sparse(layout))
    expected = run(model, "cpu")
    offload(model, "cpu", mode)  # the rig's devices have no sparse tensors
    for _ in range(2):
        torch.testing.assert_close(run(model, "cpu"), expected)
    factors = model.blocks[0][-1].factors
    factors.mul_(2)
    assert not torch.allclose(run(model, "cpu"), expected)
    factors.mul_(0.5)
    torch.testing.assert_close(run(model, "cpu"), expected)
    if layout == torch.sparse_coo:  # torch does not assign a CSR tensor's data
        factors.data = factors.data * 2
        assert not torch.allclose(run(model, "cpu"), expected)


@modes("block")
def test_a_buffer_beside_the_weights_that_has_no_shape_yet(gpu, mode):
    device = gpu.devices[0]
    model = build("cpu")
    expected = run(model.to(device), device)
    model.to("cpu")
    model.blocks[0][0].register_buffer("later", torch.nn.UninitializedBuffer())
    offload(model, device, mode)
    for _ in range(2):
        assert torch.equal(run(model, device), expected)
    model.blocks[0][0].later.materialize((2,))
    assert torch.equal(run(model, device), expected)
    assert model.blocks[0][0].later.shape == (2,)


class Keeping(torch.nn.Module):
    """Keeps its output, which others get too, as a state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(FEATURES))

    def forward(self, x):
        self.state = x + self.state
        return self.state


@modes("block", "block-stream")
def test_a_state_beside_the_weights_that_others_have_too(gpu, mode):
    device = gpu.devices[0]

    def build_keeping():
        model = build("cpu")
        model.blocks[0].append(Keeping())
        return model

    unmoved, model = build_keeping().to(device), build_keeping()
    offload(model, device, mode)
    for _ in range(3):
        assert torch.equal(run(model, device), run(unmoved, device))
    # A group on a stream leaves it there until the group comes next, as upstream does with a plain model.
    assert model.blocks[0][-1].state.device.type == ("cuda" if "use_stream" in mode else "cpu")
