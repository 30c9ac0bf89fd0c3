"""What offload of quantized weights costs next to that of plain ones, and what `keep_host_copies` saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .figure import Row, figure
from .measure import CannotMeasure, Failed, child
from .memory import _devices, _flux, _run

ROUNDS = 15


@figure("offload")
def offload() -> Iterator[Row]:
    """Bytes that model offload copies back; time of group and sequential offload against plain weights."""
    for bits in (4, 8):
        said = child("offloading:copied_back", bits)
        yield Row(
            f"{bits}-bit model offload with keep_host_copies: device to host per run / bytes of weights",
            said["kept"], goal=0.0, exact=True, detail=f"without keep_host_copies: {said['plain']:.2f}",
        )  # fmt: skip
    for bits in (4, 8):
        for layers in (1, 10, 100):
            what = f"{bits}-bit group of {layers} layers: onload and offload / plain layers"
            yield Row(what, **_timed("offloading:grouped", bits, layers, False), goal=1.15)
            what += " on a stream"
            yield Row(what, **_timed("offloading:grouped", bits, layers, True), goal=1.15)
    for kind in ("quanto", "torchao", "GGUF"):
        for layers in (1, 10, 100):
            for stream in (False, True):
                group = f"{kind} group of {layers} layers" + (" on a stream" if stream else "")
                timed = _timed("offloading:grouped", kind, layers, stream)
                # diffusers itself moves GGUF weights.
                goal = None if kind == "GGUF" else 1.15
                yield Row(f"{group}: onload and offload / plain layers", **timed, goal=goal)
                if kind != "quanto":  # which it does not move at all
                    before = _timed("offloading:grouped", kind, layers, stream, package=False)
                    yield Row(f"{group}: with / without the package", **_over(timed, before), goal=1.15)
    for bits in (4, 8):
        what = f"{bits}-bit sequential offload: hooks of a layer / plain tensors, as many and as large"
        yield Row(what, **_timed("offloading:sequential", bits), goal=1.15)
        said = child("offloading:onloaded_twice", bits)
        yield Row(
            f"{bits}-bit group onloaded twice: bytes copied by the second, and back",
            said,
            "bytes",
            0,
            exact=True,
        )


def _timed(function: str, *arguments, package: bool = True) -> dict:
    try:
        said = child(function, *arguments, package=package)
    except CannotMeasure as error:
        return {"value": None, "detail": str(error)[:110], "failed": package and isinstance(error, Failed)}
    detail = f"{1e6 * said['quantized']:.0f} us / {1e6 * said['plain']:.0f} us, {said['tensors']} tensors"
    if said.get("looks"):
        detail += f", {1e6 * said['looks']:.0f} us of two looks at the group"
    return {"value": said["ratio"], "detail": detail}


def _over(one: dict, other: dict) -> dict:
    """The ratio of two ratios to plain layers, of two processes."""
    if one["value"] is None or other["value"] is None:
        return one if one["value"] is None else other
    return {
        "value": one["value"] / other["value"],
        "detail": f"{one['value']:.2f} / {other['value']:.2f} of plain layers",
    }


def copied_back(bits: int) -> dict:
    """Bytes from the device to the CPU of a run under model offload, less those of its result, by the weights'."""
    import diffusers_quantfix as qf

    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        model = _flux(bits)
        model.to("cpu")
        weights = sum(qf.audit(model).bytes.values())
        said = {}
        for name in ("plain", "kept"):
            if name == "kept":
                qf.keep_host_copies(model)
            for _ in range(2):
                model.to(here)
                _run(model, here)
                gpu.reset()
                model.to("cpu")
            # A checksum of 8 bytes for each tensor travels.
            said[name] = round(gpu.traffic().d2h / weights, 2)
        return said


def grouped(kind: int | str, layers: int, stream: bool) -> dict:
    """Processor seconds of one onload and offload of a group, and of what diffusers does with plain weights.

    The plain group has as many layers, and each of them as many tensors, as large. Those that are one memory (CB and
    the weight of an 8-bit layer) are one.

    Also the time of two looks at whether what has to travel is what it was. Diffusers makes none: without a stream it
    moves the parameters one by one, and on a stream it assigns the host copies that it made at the start, and fails
    with KeyError where a weight was exchanged since. A LoRA, ``load_state_dict`` or the first forward pass of an 8-bit
    layer exchange weights and companions.
    """
    import torch

    from diffusers_quantfix.offloading.group_tensors import identity
    from diffusers_quantfix.offloading.inventory import inventory_of
    from diffusers_quantfix.weights.companions import companions
    from diffusers_quantfix.weights.wrappers import inner_places, is_wrapper

    def tensors_of(layer):
        if is_wrapper(layer.weight):
            held = [getattr(holder, name) for holder, name in inner_places(layer.weight)]
        elif kind == "GGUF":
            held = [layer.weight.as_tensor()]
        else:
            held = [layer.weight.data, *(found.tensor for found in companions(layer))]
        return {identity(tensor): tensor for tensor in held}.values()

    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        quantized = _layers(kind, layers)
        plain = [_plain(tensors_of(layer))[0] for layer in quantized]
        tensors = sum(len(list(layer.parameters())) for layer in plain)
        groups = [_group(torch.nn.Sequential(*each), here, stream) for each in (quantized, plain)]

        def there_and_back(group) -> Callable[[], None]:
            def call() -> None:
                group.onload_()
                group.offload_()

            return call

        def looks() -> None:
            for _ in range(2):
                inventory_of(groups[0], dropping=True)

        times = 200 // layers + 2
        said = _compared(*map(there_and_back, groups), tensors, times)
        return said | {"looks": 0 if kind == "GGUF" else min(_seconds(looks, times) for _ in range(ROUNDS))}


def sequential(bits: int) -> dict:
    """Processor seconds of accelerate's hooks before and after the forward pass of a layer, the same for plain ones."""
    import torch
    from accelerate import cpu_offload

    from diffusers_quantfix.weights.companions import companions

    stack, gpu = _devices()
    with stack:
        here = gpu.devices[0]
        layer = _layers(bits, 1)[0]
        tensors = {layer.weight.data_ptr(): layer.weight.data}
        tensors |= {found.tensor.data_ptr(): found.tensor for found in companions(layer)}
        plain = _plain(tensors.values())[0]
        values = torch.ones(1, 64)
        for module in (layer, plain):
            cpu_offload(module, here, offload_buffers=True)

        def hooks(module) -> Callable[[], None]:
            def call() -> None:
                module._hf_hook.pre_forward(module, values)
                module._hf_hook.post_forward(module, values)

            return call

        return _compared(hooks(layer), hooks(plain), len(tensors), 100)


def onloaded_twice(bits: int) -> int:
    """Bytes that the second onload of a group copies, and that its offload copies back."""
    import torch

    stack, gpu = _devices()
    with stack:
        moved = 0
        for device in (gpu.devices[0], torch.device("cuda")):
            group = _group(torch.nn.Sequential(*_layers(bits, 3)), device)
            with torch.no_grad():
                group.onload_()
                gpu.reset()
                group.onload_()
                group.offload_()
            moved += gpu.traffic().h2d + gpu.traffic().d2h
        return moved


def _layers(kind: int | str, count: int) -> list:
    """Quantized layers on the CPU: 4 and 8 bits are those of bitsandbytes."""
    import torch

    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    if isinstance(kind, str):
        return _layers_of(
            kind, torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(count)))
        )
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if kind == 4:
        return [Linear4bit(64, 64, bias=False, quant_type="nf4").to("cpu") for _ in range(count)]
    return [Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu") for _ in range(count)]


def _layers_of(kind: str, model) -> list:
    """The layers of ``model`` in 8 bits."""
    try:
        if kind == "quanto":
            from optimum import quanto

            quanto.quantize(model, weights=quanto.qint8)
            quanto.freeze(model)
            # Their scales of the input and output are buffers that only calibration uses.
            for layer in model:
                layer._buffers.clear()
        elif kind == "torchao":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig(version=2))
        else:
            import gguf
            import torch
            from diffusers.quantizers.gguf.utils import GGUFParameter

            packed = [
                torch.zeros(64, 68, dtype=torch.uint8) for _ in model
            ]  # two blocks of 34 bytes in each row
            for layer, data in zip(model, packed, strict=True):
                layer.weight = GGUFParameter(data, quant_type=gguf.GGMLQuantizationType.Q8_0)
    except ImportError as error:
        raise CannotMeasure(str(error)) from error
    return list(model)


def _plain(tensors):
    """A module with one parameter or buffer for each tensor, as large."""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False)
    for index, tensor in enumerate(tensors):
        copied = torch.nn.Parameter(tensor.detach().clone(), requires_grad=False)
        layer.register_parameter("weight" if not index else f"more{index}", copied)
    return torch.nn.Sequential(layer)


def _group(model, device, stream: bool = False):
    """The group of ``model``, which is offloaded as one block."""
    import torch
    from diffusers.hooks import apply_group_offloading

    whole = torch.nn.Sequential(torch.nn.ModuleList([model]))
    apply_group_offloading(
        whole,
        device,
        torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=stream,
    )
    for module in whole.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry and registry.hooks.get("group_offloading")
        if hook is not None and model in hook.group.modules:
            return hook.group
    raise CannotMeasure("diffusers made no group of it")


def _compared(one: Callable[[], None], other: Callable[[], None], tensors: int, times: int) -> dict:
    """The best of several turns of each: other work on the machine only adds to them."""
    pairs = [(_seconds(one, times), _seconds(other, times)) for _ in range(ROUNDS)]
    quantized, plain = (min(seconds) for seconds in zip(*pairs, strict=True))
    return {"ratio": quantized / plain, "quantized": quantized, "plain": plain, "tensors": tensors}


def _seconds(call: Callable[[], None], times: int) -> float:
    call()
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times
