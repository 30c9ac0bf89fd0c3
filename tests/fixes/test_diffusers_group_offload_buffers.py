"""diffusers-group-offload-buffers: group offloading leaves buffers on the GPU."""

from __future__ import annotations

import weakref

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_left, assert_works, assert_works_in_every_mode, modes, offload

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-buffers"
STAYED = r"bytes stayed on cuda"

streams = modes("leaf-stream", "block-stream", "leaf-low", "block-low", "leaf-record", "block-record")


class Packed(torch.nn.Linear):
    """A layer whose weight is a buffer, as in the layouts of GPTQ; it counts its calls in another one."""

    def __init__(self, features: int = 64):
        super().__init__(features, features)
        weight = self.weight.data
        del self.weight
        self.register_buffer("weight", weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


def build(device):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(Packed(), torch.nn.BatchNorm1d(64), Packed()) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sequential(*blocks))
    return model.to(device).eval()


def run(model, device):
    with torch.no_grad():
        return model(torch.ones(2, 64, device=device)).cpu()


@streams
@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_buffers_leave_the_device(gpu, mode):
    device = gpu.devices[0]
    assert_works(gpu, device, lambda: build(device), lambda model: run(model, device), mode)


@streams
def test_in_inference_mode_and_out_of_it(gpu, mode):
    device = gpu.devices[-1]
    assert_works_in_every_mode(gpu, device, lambda: build(device), lambda model: run(model, device), mode)


class Rotary(torch.nn.Module):
    """Takes a view of its buffer, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(64.0))

    def forward(self, x):
        return x * self.frequencies[None]


@modes("leaf", "block", "leaf-stream", "block-stream")
@pytest.mark.defect(
    FIX_ID, shows="do not track version counter|Inplace update to inference|bytes stayed on cuda"
)
def test_a_view_of_a_buffer_after_a_run_in_inference_mode(gpu, mode):
    device = gpu.devices[0]

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 64), Rotary(), torch.nn.ModuleList([Packed()])[0], Rotary()
        )

    model = build().eval()
    expected = run(build().eval().to(device), device)
    before = gpu.allocated(device)
    offload(model, device, mode)
    for inference in (False, True, False, True, True, False):
        with torch.inference_mode(inference):
            assert torch.equal(run(model, device), expected)
        assert gpu.allocated(device) == before, f"bytes stayed on {device}"


@modes("leaf", "block")
def test_a_buffer_that_has_no_shape_yet(gpu, mode):
    device = gpu.devices[0]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    expected = run(model.to(device), device)
    model.to("cpu")
    model[0].register_buffer("later", torch.nn.UninitializedBuffer())
    offload(model, device, mode)
    for _ in range(2):
        assert torch.equal(run(model, device), expected)


@streams
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.defect(FIX_ID, shows="written to")
def test_what_is_written_to_a_buffer_is_kept(gpu, mode, inference):
    device = gpu.devices[0]
    model = build(device)
    offload(model, device, mode)
    for _ in range(3):
        with torch.inference_mode(inference):
            run(model, device)
    calls = [module.calls.item() for module in model.modules() if isinstance(module, Packed)]
    assert calls == [3] * 6, f"written to the buffers: {calls}"


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.defect(FIX_ID, shows="written to")
@modes("leaf-stream", "leaf-low", "leaf-record")
def test_what_a_model_writes_to_its_own_buffer_is_kept(gpu, mode, inference):
    """At leaf level a buffer beside the layers comes with the model that has it."""
    device = gpu.devices[0]

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.layer(x)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), Counting()).to(device)
    offload(model, device, mode)
    for _ in range(3):
        with torch.inference_mode(inference):
            run(model, device)
    assert model[1].calls.item() == 3, f"written to the buffer: {model[1].calls}"
    assert_left(gpu, device, 0)


@streams
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
@pytest.mark.defect(FIX_ID, shows="running statistics")
def test_running_statistics_are_kept(gpu, mode, gradients):
    """Batch normalization writes to its buffers in training mode, and torch does not count that."""
    device = gpu.devices[0]
    unmoved, model = build(device).train(), build(device).train()
    offload(model, device, mode)
    for count in range(3):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(count)).to(device)
        with torch.set_grad_enabled(gradients):
            outputs = [each(inputs).detach().cpu() for each in (unmoved, model)]
        assert torch.equal(*outputs)
    names = "running_mean", "running_var", "num_batches_tracked"
    expected, kept = (
        [getattr(block[1], name).cpu() for block in each[1] for name in names] for each in (unmoved, model)
    )
    assert all(map(torch.equal, kept, expected)), "other running statistics"
    assert torch.equal(run(model.eval(), device), run(unmoved.eval(), device))


class Replacing(torch.nn.Module):
    """Computes its frequencies in each call, as OmniGen's rotary embedding does; or only in the first ones."""

    def __init__(self, calls):
        super().__init__()
        self.register_buffer("frequencies", torch.ones(64), persistent=False)
        self.register_buffer("unused", torch.ones(64))
        self.calls = calls

    def forward(self, x):
        if self.calls:
            self.calls -= 1
            self.frequencies = torch.arange(64.0, device=x.device) * self.frequencies.sum()
        return x * self.frequencies[None]


replacing = pytest.mark.parametrize("calls", [99, 2], ids=["each call", "the first calls"])
beside_a_layer = pytest.mark.parametrize("beside", [False, True], ids=["", "beside a layer"])


@modes("leaf", "leaf-stream", long=("leaf-low", "leaf-record"))
@replacing
@beside_a_layer
def test_a_buffer_that_forward_replaces(gpu, mode, calls, beside):
    check_replacing(gpu, mode, calls, beside)


@modes("block", "block-stream")
@replacing
@beside_a_layer
def test_a_buffer_of_a_block_that_forward_replaces(gpu, mode, calls, beside):
    check_replacing(gpu, mode, calls, beside)


def assert_only(gpu, device, before, states):
    """Of what replaced a buffer in the last run, nothing but that is left on the device."""
    there = {id(state): state for state in states if state.device.type == "cuda"}
    smallest = 512  # of an allocation, on a GPU
    assert gpu.allocated(device) - before <= sum(max(state.nbytes, smallest) for state in there.values())


def check_replacing(gpu, mode, calls, beside):
    device = gpu.devices[0]

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(64, 64)
            self.rotary = Replacing(calls)
            if beside:
                self.rotary.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.rotary(self.layer(x))

    unmoved, model = Scaled().to(device).eval(), Scaled().eval()
    expected = [run(unmoved, device) for _ in range(4)]
    del unmoved
    before = gpu.allocated(device)
    offload(model, device, mode)
    for number, one in enumerate(expected):
        assert torch.equal(run(model, device), one), f"run {number} differs"
        assert_only(gpu, device, before, [model.rotary.frequencies])


class Later(Replacing):
    """Takes a view of its buffer before it replaces it."""

    def forward(self, x):
        x = x * self.frequencies.view(1, 64)
        self.frequencies = torch.full((64,), 2.0, device=x.device)
        return x


@modes("leaf", "leaf-stream")
@pytest.mark.parametrize("kind", [Replacing, Later])
def test_a_buffer_that_forward_replaces_in_inference_mode_and_out_of_it(gpu, mode, kind):
    device = gpu.devices[0]

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 64), kind(99)).to(device).eval()

    model, unmoved = build(), build()
    before = gpu.allocated(device)
    offload(model, device, mode)
    left = gpu.allocated(device)
    for inference in (True, False, True, True, False, False):
        with torch.inference_mode(inference):
            assert torch.equal(run(model, device), run(unmoved, device))
    assert left < before
    assert_only(gpu, device, left, [model[1].frequencies])


@modes("block-stream")
def test_a_buffer_that_a_layer_of_a_block_replaces(gpu, mode):
    """The group knows the buffers of its layers as well, and has host copies of them."""
    device = gpu.devices[0]

    def build():
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), Later(99)) for _ in range(2)]
        return torch.nn.Sequential(torch.nn.Sequential(*blocks)).eval()

    unmoved, model = build().to(device), build()
    expected = [run(unmoved, device) for _ in range(3)]
    del unmoved
    before = gpu.allocated(device)
    offload(model, device, mode)
    for one in expected:
        assert torch.equal(run(model, device), one)
        assert_only(gpu, device, before, [block[1].frequencies for block in model[0]])


class Stateful(torch.nn.Module):
    """Its forward makes a new state from the one before, and lets two buffers change places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64))
        self.register_buffer("start", torch.ones(64))
        self.register_buffer("state", torch.zeros(64))
        self.register_buffer("one", torch.full((64,), 0.25))
        self.register_buffer("other", torch.full((64,), 0.5))

    def forward(self, x):
        x = self.layers(x) * self.start + self.state + self.one
        self.state = self.state * 0.5 + x.mean(0)
        self.one, self.other = self.other, self.one
        return x


def goes_on(model, module, device):
    for _ in range(3):
        yield run(model, device)


def goes_back(model, module, device):
    """It tries a step, and goes back."""
    yield run(model, device)
    states = [module.state]
    yield run(model, device)
    states.append(module.state)
    module.state = states[0]
    yield run(model, device)
    yield run(model, device)
    yield torch.stack([state.cpu() for state in states])


def exchanges_for_one_pass(model, module, device):
    """As tools for ensembles, and for the gradients of samples, call a model."""
    name = next(name for name, buffer in model.named_buffers() if buffer is module.start)
    yield run(model, device)
    for factor in (2.0, 3.0):
        replaced = {name: torch.full((64,), factor, device=device)}
        with torch.no_grad():
            yield torch.func.functional_call(model, replaced, torch.ones(2, 64, device=device)).cpu()
    yield run(model, device)
    yield module.start.cpu()


def has_both_under_names(model, module, device):
    """The rotary embeddings of transformers 4 keep their first frequencies under another name."""
    yield run(model, device)
    module.first = None
    object.__setattr__(module, "first", module.start)
    module.start = torch.full((64,), 2.0, device=device)
    yield run(model, device)
    module.start = module.first
    yield run(model, device)
    yield run(model, device)


@modes("leaf", "block", "leaf-stream", "block-stream", long=("leaf-low", "block-record"))
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "in a block"])
@pytest.mark.parametrize("program", [goes_on, goes_back, exchanges_for_one_pass, has_both_under_names])
def test_a_buffer_that_is_exchanged_and_put_back(gpu, mode, program, inside, inference):
    """What was in its place for a while was written into it for good."""
    device = gpu.devices[0]

    def build():
        module = Stateful().eval()
        return torch.nn.Sequential(torch.nn.Sequential(module)) if inside else module, module

    unmoved, module = build()
    unmoved.to(device)
    with torch.inference_mode(inference):
        expected = list(program(unmoved, module, device))
    del unmoved
    model, module = build()
    before = gpu.allocated(device)
    offload(model, device, mode)
    with torch.inference_mode(inference):
        for number, (found, one) in enumerate(zip(program(model, module, device), expected, strict=True)):
            assert torch.equal(found, one), f"result {number} differs"
    first = getattr(module, "first", module.start)  # diffusers leaves what has another name on the device
    assert_only(gpu, device, before, [*module._buffers.values(), first])


class Keeping(Stateful):
    """Its forward keeps what others have, too."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.how(self, x)


def keeps_its_input(model, x):
    h = model.layers(x) + model.state
    model.state = x
    return h


def keeps_its_output(model, x):
    model.state = model.layers(x) + model.state
    return model.state


def keeps_one_twice(model, x):
    if model.one is not model.other:
        model.one = model.other = torch.zeros(64, device=x.device)
    model.one.add_(x.mean(0))
    return model.layers(x) + model.other


def keeps_one_in_a_list(model, x):
    if not hasattr(model, "all"):
        model.state = torch.zeros(64, device=x.device)
        model.all = [model.state]
    model.all[0].add_(x.mean(0))
    return model.layers(x) + model.state


def keeps_views(model, x):
    if not hasattr(model, "both"):
        model.register_buffer("both", torch.zeros(2, 64, device=x.device), persistent=False)
        model.one, model.other = model.both[0], model.both[1]
    model.one.add_(x.mean(0))
    model.other.sub_(x.std(0))
    return model.layers(x) + model.both.sum(0)


def changes_its_form(model, x):
    h = model.layers(x) + model.state.reshape(-1, 64).sum(0)
    model.state.set_(torch.cat([model.state.reshape(-1, 64), h[:1]]))
    return h


def leaves_none(model, x):
    h = model.layers(x) + (0 if model.state is None else model.state)
    model.state = None if model.state is not None else h.mean(0)
    return h


@modes("leaf", "leaf-stream", long=("block", "block-stream", "leaf-low", "block-record"))
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize(
    "how",
    [
        keeps_its_input,
        keeps_its_output,
        keeps_one_twice,
        keeps_one_in_a_list,
        keeps_views,
        changes_its_form,
        leaves_none,
    ],
)
def test_what_others_have_too_stays_as_it_is(gpu, mode, how, inference):
    device = gpu.devices[0]
    unmoved, model = Keeping(how).to(device).eval(), Keeping(how).eval()
    offload(model, device, mode)
    with torch.inference_mode() if inference else torch.no_grad():
        x, wanted = (torch.ones(3, 64, device=device) for _ in range(2))
        for number in range(5):
            output, expected = model(x), unmoved(wanted)
            assert output.device.type == x.device.type == "cuda"
            assert torch.equal(output, expected), f"result {number} differs"
            x, wanted = output * 0.1 + 1, expected * 0.1 + 1


@modes("leaf", "leaf-stream")
def test_a_state_is_freed_with_its_last_reference(gpu, mode):
    device, model = gpu.devices[0], Stateful().eval()
    offload(model, device, mode)
    group = model._diffusers_hook.get_hook("group_offloading").group
    for _ in range(5):
        run(model, device)
        assert len(group.buffers) == 4
    left = weakref.ref(model.state)
    model.state = None
    assert left() is None


class Loads(torch.nn.Module):
    """Each part notes a statistic of its output, which the whole reads when all parts have ended."""

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.register_buffer("load", torch.zeros(64), persistent=False)

        def forward(self, x):
            x = self.layer(x)
            self.load = x.abs().mean(0)
            return x

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x + sum(part.load for part in self.parts)


@modes("leaf", "leaf-stream", "block-stream", long=("leaf-low", "leaf-record", "block-record"))
def test_a_state_that_the_model_reads_later_in_the_pass(gpu, mode):
    device = gpu.devices[0]
    unmoved, model = Loads().to(device).eval(), Loads().eval()
    offload(model, device, mode)
    for _ in range(3):
        assert torch.equal(run(model, device), run(unmoved, device))


def keeps_notes_at_it(model, device, host):
    ages = [getattr(model.state, "age", 0)]
    model.state.age = ages[0] + 1
    return torch.tensor(ages)


def adds_it(model, device, host):
    return torch.ones(64, device=device) + model.state


def gives_a_part_of_a_table(model, device, host):
    if not hasattr(model, "table"):
        model.table, model.start = True, host[1]
    host.mul_(0.5)
    return model.start


@modes("leaf", "leaf-stream", "block", "block-stream", long=("leaf-low", "leaf-record"))
@pytest.mark.parametrize("between", [keeps_notes_at_it, adds_it, gives_a_part_of_a_table])
def test_what_the_program_does_with_a_state_between_two_runs(gpu, mode, between):
    """A tensor that came into a buffer's place is nobody's but the program's."""
    device = gpu.devices[0]

    class Reading(Stateful):
        def forward(self, x):
            x = self.layers(x) * self.start.to(x.device) + self.state
            self.state, before = self.state * 0.5 + x.mean(0), self.state
            vars(self.state).update(vars(before))
            return x

    unmoved, model = Reading().to(device).eval(), Reading().eval()
    offload(model, device, mode)
    tables = [torch.ones(2, 64) for _ in range(2)]
    for _ in range(4):
        assert torch.equal(run(model, device), run(unmoved, device))
        found, wanted = (
            between(each, device, table) for each, table in zip((model, unmoved), tables, strict=True)
        )
        assert found.device == wanted.device
        assert torch.equal(found, wanted)


@modes("block")
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_a_tensor_of_the_program_that_was_put_into_a_block_stays_where_it_is(gpu, mode, inference):
    device = gpu.devices[0]
    unmoved, model = (torch.nn.Sequential(torch.nn.Sequential(Stateful())).eval() for _ in range(2))
    unmoved.to(device)
    offload(model, device, mode)
    states = [torch.full((64,), value, device=device) for value in (2.0, 3.0)]
    with torch.inference_mode(inference):
        for state in states:
            unmoved[0][0].start = model[0][0].start = state
            for _ in range(2):
                assert torch.equal(run(model, device), run(unmoved, device))
            assert state.device.type == "cuda"


class Adding(torch.nn.Module):
    """Adds its state; writes to those of the blocks that follow, which are fetched already."""

    def __init__(self, following):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        for name in ("state", "other"):
            self.register_buffer(name, torch.zeros(64))
        self.following = following

    def forward(self, x):
        for block in self.following:
            torch.cuda.synchronize(x.device)  # what was fetched has arrived
            block.state.mul_(0.5).add_(0.1)
        return self.layer(x) + self.state + self.other


class Writing(torch.nn.Module):
    """A model whose second block writes to the state of the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        last = Adding([])
        self.first = torch.nn.Linear(64, 64)
        self.blocks = torch.nn.ModuleList([Adding([]), Adding([last]), last])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@modes("block-stream")
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_a_write_to_the_new_state_of_a_block_that_is_fetched_already(gpu, mode, inference):
    """torch does not count the writes to a tensor that was made in inference mode."""
    device = gpu.devices[0]
    unmoved, model = Writing().to(device).eval(), Writing().eval()
    offload(model, device, mode)
    with torch.inference_mode(inference):
        for number in range(4):
            for each in (unmoved, model):
                each.blocks[2].state = torch.full((64,), number + 1.0, device=device)
            assert torch.equal(run(model, device), run(unmoved, device))


@modes("block-stream")
@pytest.mark.parametrize("later", [False, True], ids=["", "something that is counted comes later"])
def test_a_write_to_a_state_that_was_made_in_inference_mode_and_passes_outside(gpu, mode, later):
    """Its host copy keeps it from being counted."""
    device = gpu.devices[0]
    unmoved, model = Writing().to(device).eval(), Writing().eval()
    offload(model, device, mode)

    for each in (unmoved, model):
        each.blocks[1].following = []  # a write would be an error outside
    for _ in range(2):
        for each in (unmoved, model):
            with torch.inference_mode():
                each.blocks[2].state = torch.full((64,), 2.0, device=device)
        with torch.no_grad():
            assert torch.equal(run(model, device), run(unmoved, device))
    for each in (unmoved, model):
        each.blocks[1].following = [each.blocks[2]]
        if later:
            each.blocks[2].other = torch.full((64,), 3.0, device=device)
    for _ in range(3):
        with torch.inference_mode():
            assert torch.equal(run(model, device), run(unmoved, device))


@modes("block-stream")
def test_a_write_in_a_model_that_was_made_in_inference_mode(gpu, mode):
    """Bare it is lost, too."""
    device = gpu.devices[0]
    with torch.inference_mode():
        unmoved, model = Writing().to(device).eval(), Writing().eval()
        offload(model, device, mode)
        for _ in range(4):
            assert torch.equal(run(model, device), run(unmoved, device))


@modes("leaf", "leaf-stream", "block", "block-stream", long=("leaf-low", "leaf-record"))
def test_a_table_that_the_forward_reads_on_the_host(gpu, mode):
    """A model that keeps a tensor on the host, in the place of a buffer, finds it there in the pass."""
    device = gpu.devices[0]

    class Reading(Stateful):
        def forward(self, x):
            x = self.layers(x)
            if self.state.device.type == "cpu":
                x = x * float(self.state.numpy().mean())
            self.state = x.mean(0).cpu()
            return x

    unmoved, model = Reading().to(device).eval(), Reading().eval()
    offload(model, device, mode)
    for _ in range(4):
        assert torch.equal(run(model, device), run(unmoved, device))


@modes("leaf", "leaf-stream")
def test_a_part_that_runs_twice_and_replaces_its_state(gpu, mode):
    """Its copies for the second time were made before the first one ended."""
    device = gpu.devices[0]

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Stateful()

        def forward(self, x):
            return self.part(x) + self.part(x * 0.5)

    unmoved, model = Twice().to(device).eval(), Twice().eval()
    offload(model, device, mode)
    for _ in range(3):
        assert torch.equal(run(model, device), run(unmoved, device))


@modes("leaf-stream", long=("leaf-low", "leaf-record"))
def test_a_part_that_runs_twice_and_writes_to_its_average_uncounted(gpu, mode):
    """The last layer of the first run has fetched the part for the second one, from host copies that are written
    then."""
    device = gpu.devices[0]

    class Averaging(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.register_buffer("average", torch.full((64,), 0.3))

        def forward(self, x):
            x = self.first(x) + self.average
            self.average.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.last(x)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.part = Averaging()

        def forward(self, x):
            return self.part(x) + self.part(x * 0.5)

    unmoved, model = Twice().to(device).train(), Twice().train()
    offload(model, device, mode)
    for _ in range(4):
        assert torch.equal(run(model, device), run(unmoved, device))


@modes("leaf", "leaf-stream")
def test_a_state_that_another_part_takes_over(gpu, mode):
    device = gpu.devices[0]

    class Delay(Stateful):
        def __init__(self):
            super().__init__()
            self.part = Stateful()

        def forward(self, x):
            x = self.part(x) + self.state
            self.state = self.part.state
            return x

    unmoved, model = Delay().to(device).eval(), Delay().eval()
    offload(model, device, mode)
    for _ in range(4):
        assert torch.equal(run(model, device), run(unmoved, device))


def test_unchanged_buffers_are_not_copied_back(rig_devices):
    device = rig_devices.devices[0]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))).eval()
    before = rig_devices.allocated(device)
    mode = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True}
    offload(model, device, mode)
    run(model, device)
    rig_devices.reset()
    output = run(model, device)
    assert rig_devices.traffic().d2h == output.nbytes
    assert_left(rig_devices, device, before)


class Viewed(torch.nn.Module):
    """Its buffers are views: of what was read, as transformers 4.51 to 4.56 leaves them, and an expanded one."""

    def __init__(self, device, *blocks):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, device=device)
        self.blocks = torch.nn.Sequential(*blocks)
        self.register_buffer("weight", torch.randn(64, 64, device=device)[...])
        self.register_buffer("shift", torch.randn(64, device=device).expand(2, -1))
        self.register_buffer("shared", self.weight)
        self.register_buffer("none", None)

    def forward(self, x):
        return self.blocks(self.linear(x) @ self.weight + self.shift + self.shared.sum())


def build_viewed(device):
    torch.manual_seed(0)
    return Viewed(device, Viewed(device), Viewed(device)).eval()


@modes()
@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_buffers_that_are_views(gpu, mode):
    device = gpu.devices[0]
    assert_works(gpu, device, lambda: build_viewed(device), lambda model: run(model, device), mode)


def test_what_is_replaced(rig_devices):
    """Views alone, and nothing but the tensor object changes."""
    device = rig_devices.devices[0]
    model = build_viewed("cpu")
    plain = model.plain = torch.nn.BatchNorm1d(64)
    kept = dict(plain.named_buffers())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    offload(model, device, {"offload_type": "leaf_level"})
    assert all(buffer is kept[name] for name, buffer in plain.named_buffers())
    assert model.shared is model.weight
    assert model.none is None
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
        assert not buffer._is_view()


@modes("leaf", "leaf-stream")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_text_encoder_with_position_ids_in_its_checkpoint(gpu, tmp_path, bits, mode):
    """Its buffers come from a file. transformers 4.51 to 4.56 makes them views where it quantizes."""
    transformers = pytest.importorskip("transformers")
    from tests.rig import models

    device = gpu.devices[0]
    config = transformers.ClapTextConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99
    )
    transformers.ClapTextModelWithProjection(config).save_pretrained(tmp_path)
    before = gpu.allocated(device)
    with four_bit.skip_for_other_reasons():
        model = transformers.ClapTextModelWithProjection.from_pretrained(
            tmp_path,
            quantization_config=models.bnb_config("transformers", bits),
            device_map={"": 0},
            torch_dtype=torch.bfloat16,
        )
    assert {"position_ids", "token_type_ids"} <= {
        name.rpartition(".")[2] for name, _ in model.named_buffers()
    }
    offload(model, device, mode)
    assert_left(gpu, device, before)
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=torch.tensor([[3, 4, 5]], device=device))
        assert_left(gpu, device, before)
