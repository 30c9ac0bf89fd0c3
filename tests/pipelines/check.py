"""One pipeline with one backend: quantized, saved, loaded, and run in every placement.

The output must be that of the same quantized pipeline on one device, bit for bit, and nothing may be left behind. A
placement that fails un-quantized too, with the same type of error, is upstream's.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.pipelines import build, gguf_files, inputs, lora
from tests.pipelines.backends import BACKENDS, GGUF, REFUSED, UNSAVED
from tests.pipelines.forked import forked, line
from tests.pipelines.left import left
from tests.sweep.placements import OFFLOADS, PLACEMENTS

DENOISER = re.compile(
    r"(transformer|unconditional_transformer|unet|prior|decoder|prior_prior|image_unet|text_unet|controlnet|model"
    r"|diffusion_decoder|super_res_first|super_res_last)(_\d)?"
)
ENCODER = re.compile(r"(prior_)?text_encoder(_\d)?|bert|vision_language_encoder|language_model")
EXACT = "exact"
PLAIN = "plain"  # un-quantized


def quantized_parts(pipe) -> dict[str, Any]:
    """The denoisers and text encoders of a pipeline, by component name."""
    import diffusers
    import transformers

    return {
        name: part
        for name, part in pipe.components.items()
        if (isinstance(part, diffusers.ModelMixin) and DENOISER.fullmatch(name))
        or (isinstance(part, transformers.PreTrainedModel) and (ENCODER.fullmatch(name) or name == "model"))
    }


class Subject:
    """A pipeline as it lies on the disk: its models in folders, un-quantized or quantized, and its other components."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        pipe = build.pipeline(name)
        self.kind = type(pipe)
        self.config = build.settings(pipe)
        self._save(pipe)

    def _save(self, pipe) -> None:
        """Save the models, and keep the other components."""
        import torch

        self.others = {k: v for k, v in pipe.components.items() if not isinstance(v, torch.nn.Module)}
        self.quantized = set(quantized_parts(pipe))
        self.unsaved: dict[str, Any] = {}  # what is quantized at each load -> its configuration
        self.classes: dict[str, type] = {}
        self.dtypes: dict[str, Any] = {}
        for part, model in pipe.components.items():
            if isinstance(model, torch.nn.Module):
                self.classes[part] = type(model)
                self.dtypes[part] = next((p.dtype for p in model.parameters()), torch.bfloat16)
                model.save_pretrained(self.folder / PLAIN / part)

    def quantize(self, backend: str) -> None:
        """Quantize while loading, and save: what ``load`` with this backend loads from then on."""
        for part in self.quantized:
            if (backend, self.classes[part].__name__) in REFUSED:
                continue
            if backend == GGUF and gguf_files.is_read(self.classes[part]):
                gguf_files.write(self._load(part, self.folder / PLAIN), self.folder / backend / part)
                continue
            library = self.library(part)
            config = BACKENDS[backend](library)
            if (backend, library) in UNSAVED:
                self.unsaved[part] = config
            elif config is not None:
                model = self._load(part, self.folder / PLAIN, quantization_config=config)
                model.save_pretrained(self.folder / backend / part)

    def is_taken(self, part: str, backend: str) -> bool:
        """Whether a backend has a way to quantize a component."""
        if backend == GGUF:
            return gguf_files.is_read(self.classes[part])
        return part in self.quantized and (backend, self.classes[part].__name__) not in REFUSED

    def library(self, part: str) -> str:
        return "transformers" if _is_transformers(self.classes[part]) else "diffusers"

    def load(self, source: str, device_map=None):
        """The pipeline with its models from ``source``: ``plain``, a backend, or what was saved of one of them."""
        parts = {}
        for part in self.classes:
            saved = self.folder / source / part
            more = {"device_map": device_map} if device_map is not None and part in self.quantized else {}
            if part in self.unsaved and not source.startswith(PLAIN):
                more["quantization_config"] = copy.deepcopy(self.unsaved[part])
            parts[part] = self._load(part, saved.parent if saved.exists() else self.folder / PLAIN, **more)
        return self._together(parts)

    def _together(self, parts: dict[str, Any]):
        """The pipeline of these models."""
        pipe = self.kind(**parts, **copy.deepcopy(self.others), **self.config)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _load(self, part: str, folder: Path, **options):
        if (folder / part / gguf_files.NAME).exists():
            return gguf_files.load(self.classes[part], folder / part, self.dtypes[part])
        return (
            self.classes[part].from_pretrained(folder / part, torch_dtype=self.dtypes[part], **options).eval()
        )

    def run(self, pipe) -> list:
        return inputs.run(pipe, self.name)


def _is_transformers(kind: type) -> bool:
    import transformers

    return issubclass(kind, transformers.PreTrainedModel)


# ---- placements: those of the sweep, and some that need more than a pipeline


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
    import torch

    model = next(model for name, model in quantized_parts(pipe).items() if DENOISER.fullmatch(name))
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]

    def stop(module, arguments):
        raise Interrupted

    # The very first layer may stand before the hook of a model that is not reached yet: one in the middle will do.
    handles = [layer.register_forward_pre_hook(stop) for layer in layers[len(layers) // 2 :]]
    try:
        subject.run(pipe)
    except Interrupted:
        return
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("the run was to be interrupted, and no layer of the denoiser was reached")


# ---- outcomes


def outcome(function: Callable[[], str]) -> str:
    """What a function returns, or its error in one line."""
    try:
        return function()
    except Exception as error:
        return line(error)


def compare(outputs: list, expected: list) -> str:
    import torch

    if len(outputs) != len(expected):
        return f"differs: {len(outputs)} outputs instead of {len(expected)}"
    worst = 0.0
    for one, other in zip(outputs, expected, strict=True):
        if one.shape != other.shape:
            return f"differs: shape {tuple(one.shape)} instead of {tuple(other.shape)}"
        if not torch.equal(one, other):
            worst = max(worst, float((one.double() - other.double()).abs().max()))
            if worst != worst or worst == 0:
                return "differs: not a number"
    return EXACT if worst == 0 else f"differs by {worst:.3g}"


def reference(subject: Subject, pipe, here) -> list:
    """The output of the pipeline that came to its device in one step; its quantized models must have run."""
    import torch

    pipe.to(here)
    reached: set[str] = set()
    for name, model in quantized_parts(pipe).items():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(functools.partial(_note, reached, name))
    outputs = subject.run(pipe)
    if not outputs:
        raise AssertionError("the pipeline returned nothing that can be compared")
    if any(bool(torch.isnan(tensor.float()).any()) for tensor in outputs):
        raise AssertionError("the output is not a number")
    wanted = {name for name in subject.quantized if DENOISER.fullmatch(name)} or subject.quantized
    if not wanted & reached:
        raise AssertionError("no linear layer of a denoiser ran")
    return outputs


def _note(reached: set[str], name: str, *call) -> None:
    reached.add(name)


def _has_quantized_weights(model) -> bool:
    """Whether a model with linear layers holds weights of a class of their own, as all backends have them."""
    import torch

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    if not linear:  # GPT-2, where they are convolutions
        return True
    return any(type(weight) not in (torch.nn.Parameter, torch.Tensor) for weight in model.parameters())


class Source:
    """A pipeline that was loaded once, from ``plain`` or a backend; each use of it is a forked process."""

    def __init__(self, subject: Subject, name: str, devices, way: Callable = place):
        self.subject, self.name, self.devices, self.place = subject, name, devices, way
        self.pipe = subject.load(name)
        self.expected = forked(lambda: reference(subject, self.pipe, devices[0]))

    def outcome(self, placement: str) -> str:
        return outcome(lambda: forked(lambda: self._outcome(placement)))

    def _outcome(self, placement: str) -> str:
        said = EXACT
        for outputs in self.place(self.subject, self.name, self.pipe, placement, *self.devices):
            said = compare(outputs, self.expected)
            if said != EXACT:
                break
        return said


def examine(
    name: str, backend: str, placements, devices, folder: Path, kind: type = Subject, way: Callable = place
) -> Iterator[tuple[str, str]]:
    """(placement, outcome) for each: ``exact``, ``upstream: ...`` or what went wrong; ``build`` and ``load`` first.

    ``kind`` is the class of the subject, ``way`` how it is placed: those of modular pipelines are others.
    """
    made: dict[str, Any] = {}

    def step(key: str, function: Callable[[], Any]) -> str:
        def keep() -> str:
            made[key] = function()
            return EXACT

        return outcome(keep)

    def plain() -> str:
        """Whether the un-quantized pipeline runs on one device."""
        return (
            EXACT if "plain" in made else step("plain", lambda: Source(made["subject"], PLAIN, devices, way))
        )

    def quantized() -> Source:
        made["subject"].quantize(backend)
        source = Source(made["subject"], backend, devices, way)
        for part, model in quantized_parts(source.pipe).items():
            if made["subject"].is_taken(part, backend) and not _has_quantized_weights(model):
                raise AssertionError(f"no weight of {part} is quantized")
        return source

    built = step("subject", lambda: kind(name, folder))
    loaded = step("quantized", quantized) if built == EXACT else ""
    if loaded not in ("", EXACT):
        built = plain()
    yield "build", built
    if built != EXACT:
        return
    yield "load", loaded
    if loaded != EXACT:
        return
    for placement in placements:
        said = made["quantized"].outcome(placement)
        if said != EXACT:
            without = plain()
            if without == EXACT:
                without = made["plain"].outcome(placement)
            if _same_fault(said, without):
                said = f"upstream: {without}"
        yield placement, said


def _same_fault(said: str, plain: str) -> bool:
    """Whether the un-quantized pipeline fails alike: by its type, and by no fewer bytes left behind."""
    kinds, sizes = [], []
    for one in (said, plain):
        kinds.append(re.split(r"[: ]", one, maxsplit=1)[0])
        left = re.match(r"AssertionError: (\d+) bytes", one)
        sizes.append(int(left[1]) if left else 0)
    return kinds[0] == kinds[1] and sizes[0] <= sizes[1]
