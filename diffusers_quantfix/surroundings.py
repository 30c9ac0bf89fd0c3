"""Isolates probes from the program's torch state: in this thread, new tensors are float32 and on the CPU.

Libraries are often imported lazily, in the middle of other work: transformers imports optimum-quanto, and with it
diffusers, while new tensors go to ``meta`` in half precision.  A probe that builds a layer would fail there, and its
random weights would change the numbers that the program draws next.

The default dtype and the random generators belong to the process: another thread may be using them right now, and a
child may be forked at any time.  So they are not changed here, not even temporarily.  Instead a function mode, which is
local to the thread, passes dtype, device and a generator to the functions that would use the defaults.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from operator import attrgetter

from .engine.target import finished
from .torch_modes import without_dispatch_modes, without_function_modes, without_tracing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["on_meta", "usual"]

# These infer the dtype from the values, and use the default dtype for Python floats only.
_OF_VALUES = ("arange", "as_tensor", "asarray", "full", "scalar_tensor", "tensor")
_FLOATING = ("empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros")
# The functions that use a default device, as listed in torch.utils._device, which a program may never import.
_ON_DEVICE = (
    *_OF_VALUES, *_FLOATING, "bartlett_window", "blackman_window", "empty_permuted", "empty_quantized", "fft.fftfreq",
    "fft.rfftfreq", "hamming_window", "hann_window", "kaiser_window", "logspace", "nested.nested_tensor", "randint",
    "randperm", "range", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor",
    "sparse_csc_tensor", "sparse_csr_tensor", "tril_indices", "triu_indices",
)  # fmt: skip
_RANDOM = ("bernoulli", "multinomial", "normal", "rand", "randint", "randn", "randperm")
_RANDOM_METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
    "random_", "uniform_",
)  # fmt: skip
_class: Callable[[str], Any] | None = None


@contextlib.contextmanager
def usual() -> Iterator[Callable[[bool], str]]:
    """In this thread, new tensors are float32 and on the CPU, gradients are enabled and what the program has put around
    its own operations is off: modes, transforms, tracing, hooks of saved tensors.

    Does nothing where torch is not imported, or is a mock, as while documentation is built.

    What it yields says what a probe cannot be kept from at that moment, as a phrase; empty if there is nothing. It is
    called with whether the probe has failed.
    """
    torch: Any = finished("torch")
    if torch is None or "torch.overrides" not in sys.modules:
        yield lambda failed: ""
        return
    # No `ExitStack`: after Ctrl-C between the effect of an `__enter__` and its own next step, the effect would stay.
    with (
        without_tracing(torch),
        _without_transforms(),
        without_dispatch_modes(torch),
        without_function_modes(),
        _without_saved_tensors_hooks(torch),
        torch._C._DisableAutocast(),
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext(),
        contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad(),
        _mode("cpu"),
    ):
        yield partial(_disturbance, torch)


def _disturbance(torch: Any, failed: bool) -> str:
    if _weights_are_replaced(torch):
        return "models are made without weights"
    # These may stay for the whole process, so an answer is not asked for again because of them.
    if failed and _hooks_of_all_modules(torch):
        return "the program has hooks on all modules"
    if failed and torch.__future__.get_swap_module_params_on_conversion():
        return "torch swaps parameters in Module.to()"
    compiler = sys.modules.get("torch.compiler")
    return "torch is compiling" if compiler is not None and compiler.is_compiling() else ""


def on_meta() -> contextlib.AbstractContextManager[Any]:
    """In this thread, new tensors are float32 and on ``meta``.

    What probes use instead of ``with torch.device("meta")``, which also sets a global variable that torch._dynamo
    reads.
    """
    mode: contextlib.AbstractContextManager[Any] = _mode("meta")
    return mode


def _without_transforms() -> contextlib.AbstractContextManager[Any]:
    """Outside of the thread's ``torch.vmap``, ``torch.func.grad`` and the like."""
    functorch = sys.modules.get("torch._functorch.pyfunctorch")
    if functorch is None or sys.modules["torch"]._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = functorch.temporarily_clear_interpreter_stack()
    return found


def _without_saved_tensors_hooks(torch: Any) -> contextlib.AbstractContextManager[None]:
    """Without what the program does to tensors that are saved for a backward pass, and without its ban on that."""
    engine = torch._C._autograd
    top = getattr(engine, "_top_saved_tensors_default_hooks", None)
    if top is None:  # torch 2.5
        return contextlib.nullcontext()
    ban = engine._saved_tensors_hooks_get_disabled_error_message()
    if top(True) is None and ban is None:
        return contextlib.nullcontext()
    return _without_hooks(engine, top, ban)


@contextlib.contextmanager
def _without_hooks(engine: Any, top: Callable[[bool], Any], ban: str | None) -> Iterator[None]:
    theirs: list[Any] = []
    if ban is not None:
        engine._saved_tensors_hooks_enable()
    try:
        while (hooks := top(True)) is not None:
            theirs.append(hooks)
            engine._pop_saved_tensors_default_hooks()
        yield
    finally:
        for hooks in reversed(theirs):
            engine._push_saved_tensors_default_hooks(*hooks)
        if ban is not None and theirs:
            engine._saved_tensors_hooks_disable(
                ban, False
            )  # as torch itself does around hooks that are there
        elif ban is not None:
            engine._saved_tensors_hooks_disable(ban)


def _mode(device: str) -> Any:
    """A function mode that passes ``device``, float32 and a generator to functions that are called without them."""
    global _class
    if _class is None:
        _class = _mode_class()
    return _class(device)


def _mode_class() -> Callable[[str], Any]:
    torch: Any = sys.modules["torch"]
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

    constructors = constructors_of(torch)
    floating = {getattr(torch, name) for name in _FLOATING}
    of_values = {getattr(torch, name) for name in _OF_VALUES}
    random = {getattr(torch, name) for name in _RANDOM}
    random |= {getattr(torch.Tensor, name) for name in _RANDOM_METHODS}
    changed = constructors | floating | of_values | random

    def within_device() -> bool:
        device = sys.modules.get("torch.utils._device")  # absent until a device is entered
        return device is not None and any(
            isinstance(mode, device.DeviceContext) for mode in _get_current_function_mode_stack()
        )

    class Usual(TorchFunctionMode):  # type: ignore[misc]  # torch's types are skipped
        def __init__(self, device: str) -> None:
            super().__init__()
            self.device = device
            self.generator: Any = None

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in changed and not (kwargs and "generator" in kwargs):
                if func is torch.Tensor.to and _is_meta(args, kwargs or {}) and _weights_are_replaced(torch):
                    return args[0]
                return func(*args, **(kwargs or {}))
            kwargs = dict(kwargs or {})

            def lacks(name: str) -> bool:
                return kwargs.get(name) is None

            # Inside the library's own ``with torch.device(...)``, that device is the right one.
            if func in constructors and lacks("device") and not within_device():
                kwargs["device"] = self.device
            if lacks("dtype") and (func in floating or (func in of_values and _has_float((args, kwargs)))):
                kwargs["dtype"] = torch.float32
            # The functions of torch.nn.init pass on the generator that they get.
            if lacks("generator") and (func in random or "generator" in kwargs):
                tensor = next(filter(torch.is_tensor, (*args, *kwargs.values())), None)
                if torch.device(kwargs.get("device") or getattr(tensor, "device", "cpu")).type == "cpu":
                    self.generator = self.generator or torch.Generator().manual_seed(0)
                    kwargs["generator"] = self.generator
            return func(*args, **kwargs)

    return Usual


def constructors_of(torch: Any) -> set[Any]:
    """Those functions of `_ON_DEVICE` that this torch has."""
    found = set()
    for name in _ON_DEVICE:
        with contextlib.suppress(AttributeError):
            found.add(attrgetter(name)(torch))
    return found


def _is_meta(args: Any, kwargs: Any) -> bool:
    """Whether ``Tensor.to`` is called with the device ``meta``."""
    return any(
        str(value) == "meta" for value in (*args[1:2], kwargs.get("device")) if not hasattr(value, "shape")
    )


def _weights_are_replaced(torch: Any) -> bool:
    """Whether new weights of any model lose their values, as within ``accelerate.init_empty_weights``.

    It may hold for all threads: one may load a model while another imports a library. With ``accelerate-init-threads``
    it holds for the thread that loads.
    """
    module = torch.nn.Module
    for function in (module.register_parameter, module.register_buffer):
        own = getattr(function, "of_this_thread", None)
        if (own() if own is not None else function).__module__ != module.__module__:
            return True
    return False


def _hooks_of_all_modules(torch: Any) -> bool:
    """Whether the program is called with every layer that any thread calls or fills, a probe's too, and may raise."""
    module = sys.modules[torch.nn.Module.__module__]
    return any(
        value
        for name, value in vars(module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    )


def _has_float(values: Any) -> bool:
    """Whether the values include a Python float, and nothing with a dtype of its own."""
    if isinstance(values, dict):
        values = values.values()
    found = False
    for value in values:
        if hasattr(value, "dtype"):
            return False
        found = found or isinstance(value, float)
        if isinstance(value, (list, tuple, dict)):
            found = found or _has_float(value)
    return found
