"""accelerate-init-threads: models are made without weights, in several threads at once."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import threading

import pytest

from diffusers_quantfix.engine.errors import TargetMissing
from diffusers_quantfix.fixes.targets import TARGETS
from diffusers_quantfix.loading import turns
from diffusers_quantfix.models import own_thread
from diffusers_quantfix.models.own_thread import in_own_thread, replaced
from diffusers_quantfix.verify.models.threads import kept, overlapping

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

TARGETS_HERE = ("accelerate-init-on-device", "peft-init-on-device", "transformers-init-on-device")
ALL = [
    pytest.param(name, marks=pytest.mark.defect(name, shows="a new layer is on meta|torch.empty is on meta"))
    for name in TARGETS_HERE
]
ALL_CONTEXTS = (
    "accelerate.init_empty_weights",
    "peft.utils.integrations.init_empty_weights",
    "transformers.integrations.accelerate.init_empty_weights",
    "transformers.initialization.no_tie_weights",
    "transformers.initialization.guard_torch_init_functions",
    "diffusers.models.modeling_utils.no_init_weights",
)
Module = torch.nn.Module


@pytest.fixture(autouse=True)
def usual_torch():
    names = ("empty", "zeros", "ones", "full")
    places = [(Module, "register_parameter"), (Module, "register_buffer"), *((torch, name) for name in names)]
    with kept(*places):
        yield


def context_of(name: str):
    try:
        return importlib.import_module(TARGETS[name].module).init_empty_weights
    except (ImportError, AttributeError):
        pytest.skip(f"there is no init_empty_weights in {TARGETS[name].module} here")


def assert_usual(when: str) -> None:
    layer = torch.nn.BatchNorm1d(1)
    for tensor in (*layer.parameters(), *layer.buffers()):
        assert tensor.device.type == "cpu", f"a new layer is on {tensor.device} {when}"
    assert torch.empty(1).device.type == "cpu", f"torch.empty is on {torch.empty(1).device} {when}"


def in_thread(work):
    """What ``work()`` returns or raises in another thread."""
    found: list = []

    def call() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    value, error = found[0]
    if error is not None:
        raise error
    return value


@pytest.mark.parametrize("name", ALL)
def test_two_threads(name):
    context = context_of(name)
    before = Module.register_parameter
    overlapping(context)
    assert_usual("after two threads")
    assert Module.register_parameter is before


@pytest.mark.parametrize("buffers", [None, False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_layer_of_another_thread(name, buffers):
    context = context_of(name)
    if buffers and name != "peft-init-on-device":
        pytest.skip("its changes are made by torch, for one thread")
    with context(include_buffers=buffers):
        layer = torch.nn.BatchNorm1d(1)
        assert layer.weight.is_meta and layer.running_mean.is_meta == bool(buffers)
        in_thread(lambda: assert_usual("meanwhile"))
    assert_usual("afterwards")


@pytest.mark.parametrize("name", TARGETS_HERE)
def test_nested_in_one_thread(name):
    context = context_of(name)
    before = Module.register_parameter
    with context():
        with context(), contextlib.suppress(ValueError):
            assert torch.nn.Linear(1, 1).weight.is_meta
            raise ValueError
        assert torch.nn.Linear(1, 1).weight.is_meta
    assert Module.register_parameter is before
    with pytest.raises(KeyError), context():
        raise KeyError
    assert Module.register_parameter is before
    assert_usual("afterwards")


def test_two_libraries_at_once():
    contexts = []
    for name in TARGETS_HERE:
        with contextlib.suppress(pytest.skip.Exception):
            contexts.append(context_of(name))
    before = Module.register_parameter
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
            assert torch.nn.Linear(1, 1).weight.is_meta
    assert Module.register_parameter is before


@pytest.mark.parametrize("name", ALL)
def test_it_is_left_in_another_thread(name):
    entered = context_of(name)()
    before = Module.register_parameter
    in_thread(entered.__enter__)
    assert_usual("meanwhile")
    entered.__exit__(None, None, None)
    assert Module.register_parameter is before


def test_an_initialization_that_a_model_skips_within():
    """As models of GPTQ do; it is there again afterwards."""
    modeling_utils = importlib.import_module("diffusers.models.modeling_utils")
    if not hasattr(modeling_utils, "no_init_weights"):
        pytest.skip("this diffusers skips nothing itself")
    init, linear = torch.nn.init, importlib.import_module("torch.nn.modules.linear")
    with kept((init, "kaiming_uniform_")):
        before = init.kaiming_uniform_
        with modeling_utils.no_init_weights():
            init.kaiming_uniform_ = lambda tensor, *args, **kwargs: tensor
        assert init.kaiming_uniform_ is before
        assert linear.Linear(1, 1).weight.isfinite().all()


@pytest.mark.parametrize("name", TARGETS_HERE)
def test_what_a_program_puts_there_in_the_inner_of_two(name):
    """The inner one removes it, as without the patch: the outer one goes on."""
    context = context_of(name)
    before = Module.register_parameter
    with context():
        with context():
            Module.register_parameter = before
        assert torch.nn.Linear(1, 1).weight.is_meta
    assert Module.register_parameter is before


@pytest.mark.parametrize("name", ALL)
def test_another_function_stays(name):
    """Put there by another library in the middle, and left in the middle of the next."""
    context = context_of(name)
    before, seen = Module.register_parameter, []
    with context():
        within = Module.register_parameter

        def theirs(module, name, parameter):
            seen.append(name)
            within(module, name, parameter)

        Module.register_parameter = theirs
        in_thread(lambda: assert_usual("meanwhile"))
        assert torch.nn.Linear(1, 1).weight.is_meta
        with context():
            assert torch.nn.Linear(1, 1).weight.is_meta
        assert Module.register_parameter is theirs
    # As without the patch.
    assert Module.register_parameter is before
    Module.register_parameter = theirs
    assert_usual("under their function")
    with context():
        assert torch.nn.Linear(1, 1).weight.is_meta
    Module.register_parameter = within
    assert_usual("under what they found")
    with context():
        assert torch.nn.Linear(1, 1).weight.is_meta
    Module.register_parameter = before
    assert "weight" in seen


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", TARGETS_HERE)
def test_a_child_that_is_forked_meanwhile(name):
    context = context_of(name)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with context():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            with context():
                assert torch.nn.Linear(1, 1).weight.is_meta
            status = 0
        os._exit(status)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0


@pytest.mark.parametrize("name", TARGETS_HERE)
def test_it_is_used_as_before(name):
    context = context_of(name)
    layer = context()(lambda: torch.nn.Linear(1, 1))()
    assert layer.weight.is_meta
    module = importlib.import_module(TARGETS[name].module)
    function = getattr(module, "init_on_device", None) or module._init_on_device
    assert list(inspect.signature(function).parameters) == ["device", "include_buffers"]
    with function(torch.device("meta")):
        assert torch.nn.Linear(1, 1).weight.is_meta
        assert "self" in inspect.signature(Module.register_parameter).parameters
    assert not torch.nn.Linear(1, 1).weight.is_meta


def test_peft_skips_it_for_one_thread():
    integrations = pytest.importorskip("peft.utils.integrations")
    if not hasattr(integrations, "_skip_init_on_device"):
        pytest.skip("this peft skips nothing")
    with integrations.init_empty_weights():
        with integrations._skip_init_on_device():
            assert torch.nn.Linear(1, 1).weight.device.type == "cpu"
        assert torch.nn.Linear(1, 1).weight.is_meta


@pytest.mark.defect("peft-init-on-device", shows="a layer without weights is on cpu", needs="peft>=0.16")
def test_peft_skips_it_while_another_thread_makes_models():
    integrations = pytest.importorskip("peft.utils.integrations")
    if not hasattr(integrations, "_skip_init_on_device"):
        pytest.skip("this peft skips nothing")

    def without_weights():
        with integrations.init_empty_weights():
            return torch.nn.Linear(1, 1).weight.device

    with integrations._skip_init_on_device():
        device = in_thread(without_weights)
    assert device.type == "meta", f"a layer without weights is on {device}"


def test_a_replacement_that_calls_what_it_found():
    """As those of transformers, which keep what they find in ``torch.nn.init`` when they are imported."""
    with replaced(torch, "zeros", lambda *args: torch.full(args, 1.0)):
        found = in_thread(lambda: torch.zeros)
        with replaced(torch, "zeros", lambda *args: found(*args) + 2.0):
            assert torch.zeros(1).item() == 3.0
        assert torch.zeros(1).item() == 1.0
        assert in_thread(lambda: torch.zeros(1).item()) == 0.0
    assert found(1).item() == 0.0


def test_a_wrapped_context_manager_is_left_alone():
    import functools

    import accelerate.big_modeling

    @functools.wraps(accelerate.big_modeling.init_on_device)
    def theirs(*args, **kwargs):
        return accelerate.big_modeling.init_on_device(*args, **kwargs)

    with pytest.raises(TargetMissing):
        in_own_thread(theirs)


@pytest.mark.skipif(sys.gettrace() is not None, reason="under a debugger")
@pytest.mark.parametrize("name", ALL_CONTEXTS)
def test_interrupted_anywhere(name):
    """Wherever a signal handler raises, new layers have weights afterwards, and no thread waits."""
    module, _, function = name.rpartition(".")
    try:
        context = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        pytest.skip(f"there is no {name} here")
    with context():
        pass

    class Interruption(BaseException):
        pass

    def interrupted_at(point: int) -> int:
        count = 0

        def call(frame, event, argument):
            nonlocal count
            if event not in ("call", "c_return") or "own_thread" not in frame.f_code.co_filename:
                return
            count += 1
            if count == point:
                sys.setprofile(None)
                raise Interruption

        with contextlib.suppress(Interruption):
            sys.setprofile(call)
            try:
                with context():
                    pass
            finally:
                sys.setprofile(None)
        return count

    points = interrupted_at(-1)
    for point in range(1, points + 1, max(1, points // 100)):
        interrupted_at(point)
        assert not torch.nn.Linear(1, 1).weight.is_meta, point
        weight = torch.zeros(1)
        torch.nn.init.constant_(weight, 1.0)
        assert weight.item() == 1.0, point
        for lock in (own_thread._lock.held, turns._turn.held):
            assert not lock._is_owned(), point
