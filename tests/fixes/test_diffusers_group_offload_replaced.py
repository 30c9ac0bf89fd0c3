"""diffusers-group-offload-replaced: data that the program assigns to weights of a group with a stream."""

from __future__ import annotations

import pytest

from diffusers_quantfix.fixes.diffusers import group_offload_prefetch
from tests.fixes.callers import interrupt, stopped_at_each_line
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    BLOCK,
    LEAF,
    LOW,
    STREAM,
    assert_exchanged_is_moved,
    assert_exchanged_is_moved_after_interruptions,
    assert_left,
    modes,
    net,
    offload,
)

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-replaced"
WIDTH = 64

streams = modes("leaf-stream", "block-stream", long=("leaf-low", "block-low", "leaf-record", "block-record"))


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def build(device):
    return net(linear).to(device)


def run(model, device):
    dtype = torch.float32 if torch.float8_e4m3fn is model.first.weight.dtype else model.first.weight.dtype
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=device, dtype=dtype)).float().cpu()


def weight(model):
    at = model.blocks[1][2].weight
    at.data = torch.full((WIDTH, WIDTH), 0.01, device=at.device)


def all_weights(model):
    model._apply(lambda tensor: tensor * 1.5)


def same_memory_in_another_order(model):
    at = model.blocks[0][0].weight
    at.data = at.data.t()


def same_memory_in_another_shape(model):
    at = model.blocks[0][0].bias
    at.data = at.data[:1]


def expanded(model):
    at = model.blocks[0][0].bias
    at.data = torch.full((1,), 0.5, device=at.device).expand(WIDTH)


def other_dtype(model):
    model.to(torch.bfloat16)


def vector(model):
    values = torch.nn.utils.parameters_to_vector(model.parameters()) * 1.5
    torch.nn.utils.vector_to_parameters(values, model.parameters())


def twice(model):
    weight(model)
    at = model.blocks[1][2].weight
    at.data = at.data * 3


CHANGES = [
    weight,
    all_weights,
    same_memory_in_another_order,
    same_memory_in_another_shape,
    expanded,
    other_dtype,
    vector,
    twice,
]


@streams
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.defect(FIX_ID, shows="Assertion|must have the same dtype")
def test_replaced(gpu, mode, change):
    device = gpu.devices[0]
    assert_exchanged_is_moved(gpu, device, build, lambda model: run(model, device), mode, change)


@modes("leaf-stream", long=("leaf-low", "leaf-record"))
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_replaced_data_of_a_loose_parameter(gpu, mode):
    """Block by block, what is in no block is onloaded without a stream, and is right."""
    device = gpu.devices[0]

    def change(model):
        model.scale.data = model.scale.data + 0.5

    assert_exchanged_is_moved(gpu, device, build, lambda model: run(model, device), mode, change)


class Shifted(torch.nn.Linear):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, x):
        return super().forward(x) + self.shift


@streams
@pytest.mark.defect("diffusers-group-offload-buffers", shows="bytes stayed")
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_replaced_data_of_a_buffer(gpu, mode):
    device = gpu.devices[0]

    def shifted(seed):
        torch.manual_seed(seed)
        return Shifted().requires_grad_(False)

    def change(model):
        at = model.blocks[0][0].shift
        at.data = at.data + 0.5

    def with_buffers(device):
        return net(shifted).to(device)

    assert_exchanged_is_moved(gpu, device, with_buffers, lambda model: run(model, device), mode, change)


@streams
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_replaced_by_data_on_the_device(gpu, mode):
    """Where the program computed it, and on a stream of its own, which is late."""
    device = gpu.devices[0]

    def change(model):
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            model.blocks[0][2].weight.data = torch.full((WIDTH, WIDTH), 0.02, device=device)
        torch.cuda.current_stream(device).wait_stream(side)

    assert_exchanged_is_moved(gpu, device, build, lambda model: run(model, device), mode, change)


@streams
@pytest.mark.defect(FIX_ID, shows="Assertion|same device|different from other tensors on")
def test_replaced_by_the_layer_before(gpu, mode):
    """In a pass, when the next layer's weights may be prefetched: what it computes with is what it holds then."""
    device = gpu.devices[0]

    def change(model):
        def replace(module, inputs):
            at = model.blocks[1][0].weight
            at.data = at.data * 0.5
            handle.remove()

        handle = model.blocks[0][0].register_forward_pre_hook(replace)

    assert_exchanged_is_moved(gpu, device, build, lambda model: run(model, device), mode, change)


@streams
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_interrupted(gpu, mode):
    device = gpu.devices[0]
    assert_exchanged_is_moved_after_interruptions(
        gpu, device, build, lambda model: run(model, device), mode, all_weights
    )


def cast(model, whole):
    """Keep the weights of each layer in another dtype, or those of the whole model."""
    from diffusers.hooks import apply_layerwise_casting

    pattern = None if whole else ("no layer has this name",)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=pattern)


@streams
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_layerwise_casting_enabled_later(gpu, mode, whole):
    """What its hooks cast on the host is what is onloaded, as without a stream."""
    device = gpu.devices[0]
    assert_exchanged_is_moved(
        gpu, device, build, lambda model: run(model, device), mode, lambda model: cast(model, whole)
    )


@streams
@pytest.mark.defect(FIX_ID, shows="must have the same dtype|Float8", needs="diffusers>=0.35")
def test_layerwise_casting_of_a_whole_model(gpu, mode):
    """Its hook, on the model itself, casts all weights on the host before any group is onloaded."""
    device = gpu.devices[0]
    unmoved = build(device)
    cast(unmoved, True)
    expected = run(unmoved, device)
    model = build("cpu")
    cast(model, True)
    offload(model, device, mode)
    for _ in range(3):
        assert torch.equal(run(model, device), expected)


class Around(torch.nn.Module):
    """A model with a parameter that a layer of it has too; the model's group is on the device during each pass."""

    def __init__(self):
        super().__init__()
        self.model = build("cpu")
        self.shift = self.model.blocks[0][2].bias

    def forward(self, x):
        return self.model(x + self.shift)


def around(device):
    return Around().to(device)


def beside(device):
    """A model whose blocks, which run one after the other, share a weight."""
    model = build(device)
    model.blocks[1][0].weight = model.blocks[0][2].weight
    return model


def shared(model):
    at = (model if hasattr(model, "blocks") else model.model).blocks[0][2]
    for tensor in (at.weight, at.bias):
        tensor.data = tensor.data * 1.5


def run_tied(model, device):
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=device)).cpu()


@streams
@pytest.mark.parametrize("tied", [beside, around])
@pytest.mark.defect(FIX_ID, shows="Assertion|same device")
def test_one_parameter_in_two_groups(gpu, mode, tied):
    """Both see it; after that, none makes host copies of what did not change."""
    device = gpu.devices[0]
    if tied is around and mode["offload_type"] == "block_level":
        pytest.skip("there the model's own group has no blocks beside it")
    assert_exchanged_is_moved(gpu, device, tied, lambda model: run_tied(model, device), mode, shared)
    model = tied("cpu")
    offload(model, device, mode)
    for _ in range(2):
        run_tied(model, device)
    shared(model)
    for _ in range(2):
        run_tied(model, device)
    copies = host_copies(model)
    run_tied(model, device)
    assert all(one is other for one, other in zip(copies, host_copies(model), strict=True))


@streams
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_in_inference_mode(gpu, mode):
    """What is made there is no weight that can never be trained."""
    device = gpu.devices[0]

    def run_there(model):
        with torch.inference_mode():
            return run(model, device)

    assert_exchanged_is_moved(gpu, device, build, run_there, mode, all_weights)
    model = build("cpu")
    offload(model, device, mode)
    run_there(model)
    all_weights(model)
    if mode["offload_type"] == "block_level":
        model.blocks[0][0] = linear(7)
    run_there(model)
    model.blocks.requires_grad_(True)


@pytest.mark.late(needs="diffusers>=0.42")
def test_another_device_is_current_when_a_transfer_is_interrupted(gpu, side):
    """A copy that never arrived is not taken for the program's data."""
    from diffusers.hooks import apply_group_offloading

    if side != "patched":
        pytest.skip("upstream takes nothing from a device")
    first, second = gpu.two
    expected = run(build(second), second)
    for part in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8):
        with torch.cuda.device(second):
            model = build("cpu")
            apply_group_offloading(model, second, torch.device("cpu"), use_stream=True, **LEAF)
        torch.cuda.set_device(first)
        run(model, second)
        interrupt(lambda model=model: run(model, second), part)
        assert torch.equal(run(model, second), expected)


@pytest.mark.long
@modes("block-stream", long=("leaf-stream",))
def test_interrupted_in_a_transfer_and_replaced_then(gpu, side, mode):
    """What a transfer has put into the model is whole before the program gets to it."""
    if side != "patched":
        pytest.skip("there is no line of ours")
    device = gpu.devices[0]
    unmoved = build(device)
    all_weights(unmoved)
    expected = run(unmoved, device)

    def prepare():
        model = build("cpu")
        offload(model, device, mode)
        run(model, device)
        run(model, device)
        return model

    stops = 0
    for model in stopped_at_each_line(prepare, lambda model: run(model, device), group_offload_prefetch):
        # Upstream's own ``with`` was interrupted too.
        torch.cuda.set_stream(torch.cuda.default_stream(device))
        all_weights(model)
        for _ in range(2):
            assert torch.equal(run(model, device), expected), f"after line {stops}"
        stops += 1
    assert stops > 50


@pytest.mark.parametrize("mode", [LEAF | STREAM, LEAF | LOW], ids=["leaf", "low"])
def test_of_a_parameter_made_in_inference_mode(gpu, mode):
    device = gpu.devices[0]
    with torch.inference_mode():
        norm = torch.nn.LayerNorm(WIDTH)
    model = torch.nn.Sequential(linear(0), norm)
    offload(model, device, mode)
    inputs = torch.ones(2, WIDTH, device=device)
    with torch.no_grad():
        first = model(inputs)
        norm.weight.data = torch.full((WIDTH,), 2.0)
        for _ in range(2):
            assert torch.equal(model(inputs), first * 2)


@pytest.mark.parametrize("mode", [LEAF | STREAM, LEAF | LOW], ids=["leaf", "low"])
def test_beside_a_sparse_buffer(gpu, mode):
    """It has no address and no strides to compare."""
    device = gpu.devices[0]
    model = torch.nn.Sequential(linear(0), linear(1))
    model[0].register_buffer("mask", torch.eye(4).to_sparse_csr())
    offload(model, device, mode)
    inputs = torch.ones(2, WIDTH, device=device)
    first = model(inputs)
    bias = model[0].bias
    bias.data = bias.data + 1
    for _ in range(2):
        expected = torch.nn.functional.linear(first.new_ones(WIDTH), model[1].weight.to(device))
        torch.testing.assert_close(model(inputs), first + expected)


@pytest.mark.parametrize("mode", [BLOCK | STREAM, BLOCK | LOW], ids=["block", "low"])
@pytest.mark.parametrize("initialized", [False, True], ids=["loaded", "initialized"])
def test_a_lazy_layer_that_is_first_used_later(gpu, mode, initialized):
    """Its parameters have no shape at first."""

    class Block(torch.nn.Sequential):
        is_short = True

        def forward(self, x):
            x = self[0](x)
            return x if self.is_short else self[1](x)

    class Model(torch.nn.ModuleDict):
        def forward(self, x):
            return self["blocks"][0](x)

    device, later = gpu.devices[0], linear(1)
    block = Block(linear(0), torch.nn.LazyLinear(WIDTH))
    model = Model({"blocks": torch.nn.ModuleList([block])})
    offload(model, device, mode)
    inputs = torch.ones(2, WIDTH)
    with torch.no_grad():
        first = model(inputs.to(device)).cpu()
        if initialized:
            block[1].initialize_parameters(inputs)
            block[1].weight.copy_(later.weight)
            block[1].bias.copy_(later.bias)
        else:
            block[1].load_state_dict(later.state_dict())
        block.is_short = False
        for _ in range(2):
            torch.testing.assert_close(model(inputs.to(device)).cpu(), later(first))


@streams
@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_replaced_after_an_interrupted_pass(gpu, mode):
    """Some groups are on the device then."""
    device = gpu.devices[0]
    unmoved = build(device)
    run(unmoved, device)
    all_weights(unmoved)
    expected = run(unmoved, device)
    del unmoved
    before = gpu.allocated(device)
    for part in (0.3, 0.6, 0.9):
        model = build("cpu")
        offload(model, device, mode)
        run(model, device)
        interrupt(lambda model=model: run(model, device), part)
        all_weights(model)
        for _ in range(2):
            assert torch.equal(run(model, device), expected)
        assert_left(gpu, device, before)


@pytest.mark.parametrize("mode", [LEAF | STREAM, BLOCK | STREAM, LEAF | LOW], ids=["leaf", "block", "low"])
def test_what_did_not_change_is_not_copied(gpu, side, mode):
    """Also not if each pass casts the weights on the device."""
    device = gpu.devices[0]
    for casting in (False, True):
        model = build("cpu")
        if casting:
            cast(model, False)
        offload(model, device, mode)
        copies = host_copies(model)
        for _ in range(3):
            run(model, device)
        model.blocks[0][0].bias.data.zero_()  # in the host copy itself
        run(model, device)
        assert all(one is other for one, other in zip(copies, host_copies(model), strict=True)), casting


def test_what_was_taken_out_is_forgotten(gpu, side):
    """Another dtype of a layer that is no longer in the model is no reason to copy the others again."""
    if side != "patched":
        pytest.skip("there is nothing that could make host copies again")
    device = gpu.devices[0]
    model = build("cpu")
    offload(model, device, BLOCK | STREAM)
    run(model, device)
    gone, model.blocks[0][0] = model.blocks[0][0], torch.nn.Identity()
    gone.half()
    expected = run(model, device)
    group = model.blocks[0]._diffusers_hook.get_hook("group_offloading").group
    copies = group.cpu_param_dict
    assert torch.equal(run(model, device), expected)
    assert group.cpu_param_dict is copies, "they were made once more"


@pytest.mark.defect(FIX_ID, shows="Assertion")
def test_new_host_copies_are_pinned_and_the_old_ones_are_freed(gpu):
    import weakref

    device = gpu.devices[0]
    model = build("cpu")
    offload(model, device, LEAF | STREAM)
    run(model, device)
    gone = [weakref.ref(copy) for copy in host_copies(model)]
    all_weights(model)
    run(model, device)
    assert all(copy.is_pinned() for copy in host_copies(model))
    assert not any(ref() is not None for ref in gone[:1]), (
        "the copy of a parameter from before is still there"
    )


def host_copies(model):
    """The host copies of the parameters in all groups of ``model``."""
    found = []
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry and registry.get_hook("group_offloading")
        if hook is not None and hook.group.offload_leader is module:
            copies = hook.group.cpu_param_dict
            found += [copies[tensor] for tensor in copies if isinstance(tensor, torch.nn.Parameter)]
    return found
