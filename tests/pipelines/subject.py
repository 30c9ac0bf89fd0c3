"""A pipeline as it lies on the disk, and which of its components are quantized."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from tests.pipelines import build, gguf_files, inputs
from tests.pipelines.backends import BACKENDS, GGUF, PLAIN, REFUSED, UNSAVED

DENOISER = re.compile(
    r"(transformer|unconditional_transformer|unet|prior|decoder|prior_prior|image_unet|text_unet|controlnet|model"
    r"|diffusion_decoder|super_res_first|super_res_last|latent_upsampler)(_\d)?"
)
ENCODER = re.compile(r"(prior_)?text_encoder(_\d)?|bert|vision_language_encoder|language_model")
TIED = {"UniDiffuserTextDecoder"}


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


def layers(model) -> list:
    """The linear layers of a model; its convolutions where it has no others."""
    import torch

    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return linear or [
        layer for layer in model.modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Conv3d))
    ]


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
                # Tied weights of a diffusers model cannot be saved as safetensors.
                more = {"safe_serialization": False} if type(model).__name__ in TIED else {}
                model.save_pretrained(self.folder / PLAIN / part, **more)

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
        if backend == PLAIN:
            return False
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
