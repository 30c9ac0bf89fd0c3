"""The placements of a pipeline: those of the sweep, and some that need more than a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.pipelines import lora
from tests.pipelines.forked import forked
from tests.pipelines.left import left
from tests.pipelines.outcomes import EXACT, compare
from tests.pipelines.subject import DENOISER, PLAIN, Subject, layers, quantized_parts
from tests.sweep.placements import OFFLOADS, PLACEMENTS


def group(options: dict[str, Any], pipe, here) -> None:
    """Group offload for what is quantized; the rest, a VAE for instance, goes to the device."""
    import torch
    from diffusers.hooks import apply_group_offloading

    models = quantized_parts(pipe)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name not in models:
            part.to(here)
    for part in models.values():
        more = {"onload_device": here, "offload_device": torch.device("cpu"), **options}
        if hasattr(part, "enable_group_offload"):
            part.enable_group_offload(**more)
        else:
            apply_group_offloading(part, **more)


GROUPS = {
    "group, leaf": {"offload_type": "leaf_level"},
    "group, leaf, stream": {"offload_type": "leaf_level", "use_stream": True},
    "group, leaf, stream, low memory": {
        "offload_type": "leaf_level",
        "use_stream": True,
        "low_cpu_mem_usage": True,
    },
    "group, block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "group, block, stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
}
LORAS = ("LoRA", "LoRA, model offload")
COMPILED = {
    "compiled, " + name: name
    for name in ("model offload", "group, leaf", "group, leaf, stream", "group, block")
}
# Tracing takes long: one pipeline for each of the common kinds of denoisers
COMPILES = {
    "FluxPipeline",
    "LTXPipeline",
    "QwenImagePipeline",
    "SanaPipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionXLPipeline",
    "WanPipeline",
}
MORE = ("device map", "interrupted", "saved under offload", *LORAS, *COMPILED)
ALL = (*(name for name in PLACEMENTS if name != "stay"), *MORE)


def place(subject: Subject, source: str, pipe, placement: str, here, there) -> Iterator[list]:
    """Place and run: the outputs of each run, and the check of what lies on the devices between."""
    compiled, placement = placement in COMPILED, COMPILED.get(placement, placement)
    if placement == "device map":
        pipe = subject.load(source, {"": str(there)})
        pipe.to(there)
    elif placement in GROUPS:
        group(GROUPS[placement], pipe, here)
    elif placement in PLACEMENTS:
        PLACEMENTS[placement](pipe, here, there)
    elif placement == "interrupted":
        pipe.enable_model_cpu_offload(device=here)
        _interrupt(subject, pipe)
    elif placement == "saved under offload":
        pipe.enable_sequential_cpu_offload(device=here)
        again = f"{source}-again"
        for part, model in quantized_parts(pipe).items():
            if source == PLAIN or part not in subject.unsaved:
                model.save_pretrained(subject.folder / again / part)
        pipe = subject.load(again)
        pipe.to(here)
    elif placement in LORAS:
        _with_lora(subject, pipe, placement, here)
    if compiled:
        _compile(pipe)
    yield subject.run(pipe)
    if compiled:
        _assert_compiled()
    if placement in OFFLOADS:
        if placement == "model offload":
            pipe.maybe_free_model_hooks()
        # ``group`` put the models there that are not quantized; upstream leaves buffers where they are used.
        staying = set(pipe.components) - set(quantized_parts(pipe)) if placement in GROUPS else set()
        if size := left(pipe, staying, buffers=placement == "sequential"):
            raise AssertionError(f"{size} bytes stayed on the device")
        yield subject.run(pipe)


def _compile(pipe) -> None:
    """Compile the denoisers, by their repeated blocks where they name them.

    Only traced: Inductor has no kernels for the stand-ins.
    """
    for name, model in quantized_parts(pipe).items():
        if not DENOISER.fullmatch(name):
            continue
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(backend="eager")
        else:
            model.compile(backend="eager")


def _assert_compiled() -> None:
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        raise AssertionError("nothing was compiled")


def _with_lora(subject: Subject, pipe, placement: str, here) -> None:
    """Run with a LoRA, which must have the effect that it has on one device, and unload it."""

    def on_one_device() -> list:
        pipe.to(here)
        # bitsandbytes chooses a layer's compute dtype in its first pass, and PEFT makes an adapter in that dtype.
        subject.run(pipe)
        lora.load(pipe)
        return subject.run(pipe)

    expected = forked(on_one_device)
    if placement == "LoRA":
        pipe.to(here)
    else:
        pipe.enable_model_cpu_offload(device=here)
    without = subject.run(pipe)
    lora.load(pipe)
    outputs = subject.run(pipe)
    if compare(outputs, without) == EXACT:
        raise AssertionError("the LoRA has no effect")
    if (said := compare(outputs, expected)) != EXACT:
        raise AssertionError(f"with the LoRA: {said}")
    pipe.unload_lora_weights()


class Interrupted(Exception):
    """What the interrupted run raises, as Ctrl-C would."""


def _interrupt(subject: Subject, pipe) -> None:
    parts = quantized_parts(pipe)
    # The prior of Flux Redux has encoders alone.
    model = next((part for name, part in parts.items() if DENOISER.fullmatch(name)), None) or next(
        iter(parts.values())
    )
    every = layers(model)

    def stop(module, arguments):
        raise Interrupted

    # The very first layer may stand before the hook of a model that is not reached yet: one in the middle will do.
    handles = [layer.register_forward_pre_hook(stop) for layer in every[len(every) // 2 :]]
    try:
        subject.run(pipe)
    except Interrupted:
        return
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("the run was to be interrupted, and no layer of the denoiser was reached")
