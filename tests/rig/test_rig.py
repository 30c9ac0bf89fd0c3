"""The fake devices behave like CUDA's: where tensors are, what mixes, what raises, and that all of it can be undone."""

from __future__ import annotations

import copy
import threading

import pytest

from tests import rig
from tests.gate import unmet
from tests.rig.fixtures import require_rig

torch = pytest.importorskip("torch")

FACTORIES = {
    "empty": lambda **kw: torch.empty(2, **kw),
    "zeros": lambda **kw: torch.zeros(2, **kw),
    "full": lambda **kw: torch.full((2,), 1.0, **kw),
    "randn": lambda **kw: torch.randn(2, **kw),
    "randperm": lambda **kw: torch.randperm(3, **kw),
    "arange": lambda **kw: torch.arange(3, **kw),
    "eye": lambda **kw: torch.eye(3, **kw),
    "triu_indices": lambda **kw: torch.triu_indices(3, 3, **kw),
    "tensor": lambda **kw: torch.tensor([1.0], **kw),
    "as_tensor": lambda **kw: torch.as_tensor([1.0], **kw),
}


# What a build without CUDA's code says, and a CUDA build whose code is kept out.
NO_CUDA = "Torch not compiled with CUDA enabled|Cannot initialize CUDA without ATen_cuda library"


@pytest.fixture
def second(gpu):
    return gpu.devices[-1]


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(gpu, second, name):
    make = FACTORIES[name]
    assert make(device=second).device == second
    assert make(device="cuda").device == gpu.devices[0]
    assert make(device="cpu").device.type == "cpu"
    with torch.device(second):
        assert make().device == second
        if not unmet("torch>=2.8"):  # before, it told the global default only
            assert torch.get_default_device() == second
    with torch.cuda.device(second):
        assert make(device="cuda").device == second
        assert make(device="cuda:0").device == gpu.devices[0]
    assert torch.cuda.current_device() == 0


def test_moves(second):
    x = torch.randn(3)
    y = x.to(second)
    assert y.device == second
    assert y.is_cuda
    assert x.device.type == "cpu"
    assert torch.equal(y.cpu(), x)
    assert y.to(second) is y
    assert y.data_ptr() not in (0, x.data_ptr())
    derived = (y.view(1, 3), y[0], y + 1, y.half(), y.clone(), torch.zeros_like(y), y.new_zeros(2))
    for same in (*derived, y.new_tensor([1.0])):
        assert same.device == second
    assert y.to(torch.float16, copy=True).device == second
    assert x.to(y).device == second
    assert x.cuda(second.index).device == second
    assert y.to(0).device.index == 0
    assert y.to("cpu").device.type == "cpu"
    assert y.to("meta").device.type == "meta"
    with torch.cuda.device_of(y):
        assert torch.cuda.current_device() == second.index


def test_errors(gpu, second):
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        torch.empty(2, device="meta").to(second)
    with pytest.raises(TypeError, match=r"can't convert cuda:\d device type tensor to numpy"):
        torch.zeros(2, device=second).numpy()
    before = [gpu.allocated(device) for device in gpu.devices]
    for use in (
        lambda: torch.zeros(2).to("cuda:57"),
        lambda: torch.zeros(2, device="cuda:57"),
        lambda: torch.cuda.set_device(57),
    ):
        with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
            use()
    assert [gpu.allocated(device) for device in gpu.devices] == before
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.randn(2, device=second, generator=torch.Generator("cpu"))


def test_mixed_devices_raise(gpu):
    first, other = gpu.pair
    a, b = torch.randn(2, 2, device=first), torch.randn(2, 2, device=other)
    message = "Expected all tensors to be on the same device"
    for operation in (
        lambda: a + b,
        lambda: a.add_(b),
        lambda: a @ b,
        lambda: torch.cat([a, b]),
        lambda: torch.nn.functional.linear(a, b),
        lambda: torch.nn.functional.layer_norm(a, (2,), b[0]),
        lambda: torch.where(a > 0, a, b),
        lambda: a + torch.zeros(2),
        lambda: torch.nn.Embedding(4, 2).to(first)(torch.tensor([1])),
        lambda: a.index_select(0, torch.tensor([0])),
    ):
        with pytest.raises(RuntimeError, match=message):
            operation()
    assert (a * torch.tensor(2.0)).device == first
    assert (torch.tensor(2.0) * a).device == first
    assert a[torch.tensor([0])].device == first
    assert torch.equal(a.copy_(b).cpu(), b.cpu())
    assert a.device == first


def test_mixed_devices_in_an_index_raise(rig_devices):
    first, other = rig_devices.pair
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.zeros(2, device=first)[torch.tensor([0], device=other)]


def test_indices_of_a_device_may_write_to_the_host(rig_devices):
    """CUDA's kernels move them; what is written must lie on the host, or be one number."""
    index = torch.tensor([1, 2], device=rig_devices.pair[0])
    written = torch.zeros(4)
    written[index] = 2.0
    assert written.tolist() == [0, 2, 2, 0]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        written[index] = torch.ones(2, device=rig_devices.pair[0])
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        written[index]


def test_views_in_inference_mode(second):
    """Of a normal tensor they are normal ones, whose changes are counted; of one that was made there they are not."""
    normal = torch.zeros(2, 3, device=second)
    with torch.inference_mode():
        views = [normal.t(), normal.view(6), normal[1:], normal.detach()]
        made_here = torch.zeros(2, 3, device=second)
        assert made_here.t().is_inference()
    assert not any(view.is_inference() for view in views)
    views[1].add_(1)
    assert normal.sum() == 6 and normal._version == 1


def test_views_and_in_place_operations_write_through(second):
    x = torch.zeros(4, 4, device=second)
    x[1] += 1
    x.t()[2].fill_(2)
    x.view(-1)[0] = 3
    x[:, 3].mul_(5)
    x[x == 2] = 4
    x.index_add_(0, torch.tensor([3], device=second), torch.ones(1, 4, device=second))
    torch.add(x[0], 10, out=x[2])
    expected = torch.tensor([[3.0, 0, 4, 0], [1, 1, 4, 5], [13, 10, 14, 10], [1, 1, 5, 1]])
    assert torch.equal(x.cpu(), expected)
    assert x.t().data_ptr() == x.data_ptr()
    assert x.unsqueeze_(0).shape == (1, 4, 4)
    first, rest = torch.split(x, [1, 3], dim=1)
    rest.zero_()
    assert x.sum() == first.sum()
    out = torch.empty(0, device=second)
    torch.mul(first, 2, out=out)
    assert torch.equal(out, first * 2)
    storage = x.untyped_storage()
    twin = torch.empty(0, device=second).set_(storage, 0, (4,), (1,))
    twin.fill_(7)
    assert x.sum() == 28
    storage.resize_(0)
    assert storage.nbytes() == 0


def test_modules_and_operators_of_all_kinds(gpu, second):
    torch.manual_seed(0)
    y = torch.randn(2, 3)
    functional = torch.nn.functional
    attention = torch.nn.MultiheadAttention(3, 1).eval()
    convolution = torch.nn.Conv2d(1, 2, 3)
    norm = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.BatchNorm1d(3)).eval()
    q = torch.randn(1, 2, 4, 8)
    for call, value in (
        (lambda t: functional.one_hot(t.long().abs(), 5), y),
        (lambda t: functional.pad(t, (1, 1)), y),
        (lambda t: functional.interpolate(t[None, None], scale_factor=2), y),
        (lambda t: torch.stack([t, t]).repeat(2, 1, 1).sort()[0], y),
        (lambda t: torch.einsum("ij,kj->ik", t, t), y),
        (lambda t: torch.cdist(t, t), y),
        (lambda t: t.topk(2).values, y),
        (lambda t: functional.scaled_dot_product_attention(t, t, t), q),
        (lambda t: attention.to(t.device)(t, t, t)[0], y),
        (lambda t: convolution.to(t.device)(t), torch.randn(1, 1, 5, 5)),
        (lambda t: norm.to(t.device)(t), y),
    ):
        result, expected = call(value.to(second)), call(value)
        assert result.device == second
        torch.testing.assert_close(result.cpu(), expected)
    module = convolution.cuda(second.index)
    assert module.weight.device == second
    assert module.cpu().weight.device.type == "cpu"


def test_autograd_and_autocast(second):
    x = torch.randn(3, device=second, requires_grad=True)
    layer = torch.nn.Linear(3, 3).to(second)
    (layer(x) * 2).sum().backward()
    assert x.grad.device == layer.weight.grad.device == second
    torch.testing.assert_close(x.grad, 2 * layer.weight.detach().sum(0))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_random_generators(second):
    def numbers(generator=None):
        return torch.randn(4, device=second, generator=generator)

    generator = torch.Generator(second).manual_seed(5)
    assert generator.device == second
    state = generator.get_state()
    first = numbers(generator)
    assert not torch.equal(first, numbers(generator))
    generator.set_state(state)
    assert torch.equal(first, numbers(generator))
    torch.manual_seed(1)
    first = numbers()
    torch.manual_seed(1)
    cpu_state = torch.get_rng_state()
    assert torch.equal(first, numbers())
    assert torch.equal(cpu_state, torch.get_rng_state())
    device_state = torch.cuda.get_rng_state(second)
    first = numbers()
    torch.cuda.set_rng_state(device_state, second)
    assert torch.equal(first, numbers())


def test_deep_copies(second):
    shared = torch.ones(4, device=second)
    parameter = torch.nn.Parameter(torch.ones(2, device=second), requires_grad=False)
    buffers = copy.deepcopy({"whole": shared, "part": shared[1:3], "parameter": parameter})
    assert {tensor.device for tensor in buffers.values()} == {second}
    assert isinstance(buffers["parameter"], torch.nn.Parameter)
    buffers["part"].zero_()
    assert buffers["whole"].sum() == 2
    assert shared.sum() == 4


def test_files(gpu, second, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    value = torch.arange(6.0)
    save_file({"a": value.to(gpu.devices[0])}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors", device=str(second))["a"]
    assert loaded.device == second
    assert torch.equal(loaded.cpu(), value)
    with safe_open(tmp_path / "x.safetensors", "pt", device=str(second)) as file:
        assert file.get_tensor("a").device == second
        assert file.get_slice("a")[1:3].tolist() == [1, 2]
    torch.save({"a": value.to(gpu.devices[0])}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["a"].device == gpu.devices[0]
    for target in (second, torch.device("cpu")):
        loaded = torch.load(tmp_path / "x.pt", map_location=target)["a"]
        assert loaded.device == target
        assert torch.equal(loaded.cpu(), value)


def test_pinned_memory(second):
    x = torch.ones(4)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert torch.equal(pinned.to(second, non_blocking=True).cpu(), x)
    assert torch.empty(2, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        pinned.to(second).pin_memory()


def test_streams_and_events(second):
    for make in (torch.cuda.Stream, torch.Stream):
        stream = make(device=second)
        default = torch.cuda.current_stream(second)
        assert stream.device == second
        as_context = make is torch.Stream and not unmet("torch>=2.7")
        with stream if as_context else torch.cuda.stream(stream):
            assert torch.cuda.current_stream(second) == stream
            x = torch.ones(2, device=second)
            event = stream.record_event()
        assert torch.cuda.current_stream(second) == default == torch.cuda.default_stream(second)
        assert torch.cuda.current_device() == 0
        default.wait_stream(stream)
        default.wait_event(event)
        x.record_stream(default)
        stream.synchronize()
        event.synchronize()
        assert stream.query()
        assert event.query()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 0


@pytest.mark.skipif(bool(unmet("torch>=2.6")), reason="torch.accelerator came with torch 2.6")
def test_the_accelerator_interface(gpu, second):
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator().type == "cuda"
    assert accelerator.device_count() == torch.cuda.device_count() == len(gpu.devices)
    accelerator.set_device_index(second.index)
    assert accelerator.current_device_index() == torch.cuda.current_device() == second.index
    accelerator.synchronize()
    if hasattr(accelerator, "memory_allocated"):
        accelerator.empty_cache()
        keep = torch.zeros(1 << 20, device=second)
        assert accelerator.memory_allocated(second) == torch.cuda.memory_allocated(second) >= keep.nbytes


def test_threads_begin_on_the_first_device(second):
    torch.cuda.set_device(second)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.zeros(2, device="cuda").device.index))
    thread.start()
    thread.join()
    assert seen == [0]


def test_everything_is_undone():
    require_rig()
    before = {
        owner: dict(vars(owner)) for owner in (torch.cuda, torch.cuda.memory, torch._C, torch.UntypedStorage)
    }
    with pytest.raises(ZeroDivisionError), rig.devices():
        leftover = torch.ones(4, device="cuda:1")
        assert torch.cuda.is_available()
        raise ZeroDivisionError
    assert {owner: dict(vars(owner)) for owner in before} == before
    assert not torch.cuda.is_available()
    assert not hasattr(torch, "accelerator") or not torch.accelerator.is_available()
    assert not torch.empty(2).is_pinned()
    for _ in range(2):
        with pytest.raises((AssertionError, RuntimeError), match=NO_CUDA):
            torch.zeros(2, device="cuda:1")
    with rig.devices():
        assert leftover.sum() == 4
        assert rig.allocated("cuda:1") == 16
        del leftover
        assert rig.allocated("cuda:1") == 0
