"""Modular pipelines: their blocks with tiny components, the placements that they have, and how they are called."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.pipelines import build, inputs, placing
from tests.pipelines.backends import BACKENDS
from tests.pipelines.families import modular as pipelines
from tests.pipelines.left import left
from tests.pipelines.subject import PLAIN, Subject
from tests.sweep.placements import PLACEMENTS

AUTO = "components manager, auto offload"
LOADED = "load_components"
ALL = ("to", "there and back", "to the other", "group, leaf, stream", "group, block", AUTO, LOADED)

# What a call is given although no block requires it; the rest of ``inputs.VALUES`` would choose other blocks.
GIVEN = re.compile("prompt|height|width|.*num_inference_steps|.*num_frames|max_sequence_length|output_type")
# What is read of the state after a run
OUTPUTS = ("images", "image", "videos", "video", "audio", "audios", "latents")


def possible() -> list[str]:
    """The placements that this release has a way for: before 0.36 a modular pipeline saves no models."""
    import diffusers
    from packaging.version import Version

    return [one for one in ALL if one != LOADED or Version(diffusers.__version__) >= Version("0.36")]


class ModularSubject(Subject):
    """A modular pipeline on the disk."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.kind = pipelines()[name]
        pipe = build.modular(name)
        said = build.overrides(build.plain_name(name))
        self.config = {
            key: said[key] for key in pipe.config if key in said and key not in pipe.component_names
        }
        self._save(pipe)

    def _together(self, parts: dict[str, Any]):
        import diffusers

        pipe = self.kind(components_manager=diffusers.ComponentsManager())
        others = {part: other for part, other in self.others.items() if build.is_loaded(pipe, part)}
        build.update(pipe, {**parts, **copy.deepcopy(others), **self.config})
        return _prepared(pipe)

    def run(self, pipe) -> list:
        import torch

        said: dict[str, Any] = {}
        for pattern, more in inputs.CALLS.items():
            if re.match(pattern, build.plain_name(self.name)):
                said.update(more)
        given = {}
        for one in pipe.blocks.inputs:
            if one.name in said and said[one.name] is not ...:
                given[one.name] = said[one.name]
            elif one.name in inputs.VALUES and (one.required or GIVEN.fullmatch(one.name)):
                given[one.name] = inputs.VALUES[one.name]
        given = {key: value() if inspect.isfunction(value) else value for key, value in given.items()}
        torch.manual_seed(0)
        encoders = self.kind.__module__.rpartition(".")[0] + ".encoders"
        with inputs.sized(self.name, encoders), inputs.ftfy(encoders):
            state = pipe(**given, generator=torch.Generator("cpu").manual_seed(0))
        return inputs.flatten([state.get(name) for name in OUTPUTS])

    def load_components(self, backend: str):
        """Saved as a modular pipeline, and loaded by it: quantized then, if ``backend`` is not ``plain``."""
        import transformers

        folder = self.folder / "modular"
        pipe = self.load(PLAIN)
        # A processor around a video processor cannot be saved where torchvision is missing.
        kept = {
            name: part
            for name, part in pipe.components.items()
            if isinstance(part, transformers.ProcessorMixin)
        }
        pipe.update_components(**dict.fromkeys(kept))
        pipe.save_pretrained(str(folder), overwrite_modular_index=True)
        pipe = self.kind.from_pretrained(str(folder))
        pipe.update_components(**kept)
        more = {}
        if backend != PLAIN:
            configs = {part: BACKENDS[backend](self.library(part)) for part in self.quantized}
            more["quantization_config"] = configs
        pipe.load_components(torch_dtype={**self.dtypes, "default": None}, **more)
        return _prepared(pipe)


def _prepared(pipe):
    pipe.set_progress_bar_config(disable=True)
    if hasattr(pipe, "disable_safety_checker"):
        pipe.disable_safety_checker()
    return pipe


def place(subject: ModularSubject, source: str, pipe, placement: str, here, there) -> Iterator[list]:
    """As ``placing.place``."""
    if placement == AUTO:
        manager = pipe._components_manager
        # By upstream's strategy a model leaves only where memory runs short: with this margin it always does.
        manager.enable_auto_cpu_offload(device=here, memory_reserve_margin="1000000GB")
        yield subject.run(pipe)
        manager.disable_auto_cpu_offload()
        if size := left(pipe, set(), buffers=False):
            raise AssertionError(f"{size} bytes stayed on the device")
        manager.enable_auto_cpu_offload(device=here, memory_reserve_margin="1000000GB")
    elif placement == LOADED:
        pipe = subject.load_components(source)
        pipe.to(here)
    elif placement in placing.GROUPS:
        placing.group(placing.GROUPS[placement], pipe, here)
    else:
        PLACEMENTS[placement](pipe, here, there)
    yield subject.run(pipe)
