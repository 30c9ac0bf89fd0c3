"""A tiny pipeline of a class, from its constructor's signature."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from typing import Any

from tests.gate import unmet
from tests.pipelines import components, configs, families

# Checkers and watermarkers that every pipeline may go without.
LEFT_OUT = {"safety_checker", "requires_safety_checker", "watermarker", "add_watermarker"}


def overrides(name: str) -> dict[str, dict[str, Any]]:
    """What ``configs`` says of a pipeline, by component."""
    merged: dict[str, Any] = {}
    older = [said for requirement, said in configs.OLDER.items() if not unmet(requirement)]
    for pattern, said in itertools.chain.from_iterable(rules.items() for rules in (configs.FAMILIES, *older)):
        if re.match(pattern, name):
            for part, value in said.items():
                if isinstance(value, dict) and isinstance(merged.get(part), dict):
                    merged[part] = {**merged[part], **copy.deepcopy(value)}
                else:
                    merged[part] = copy.deepcopy(value)
    return merged


def pipeline(name: str, dtype=None):
    """The pipeline with random weights, un-quantized, on the CPU."""
    import torch

    kind = families.pipelines()[name]
    said = overrides(name)
    kinds = kind._get_signature_types()
    parts: dict[str, Any] = {}
    for part, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        optional = parameter.default is not inspect.Parameter.empty or part in kind._optional_components
        if part in said and not isinstance(said[part], dict):
            parts[part] = said[part]
        elif part == "safety_checker" and "CosmosSafetyChecker" in str(kinds[part]):
            parts[part] = components.Unchecked()
        elif part in LEFT_OUT:
            parts[part] = None if part in ("safety_checker", "watermarker") else False
        elif part in said or not optional or _is_needed(part):
            parts[part] = components.component(kinds[part], said.get(part, {}))
        elif parameter.default is inspect.Parameter.empty:
            parts[part] = None
    made = kind(**parts)
    made.to(dtype=getattr(torch, said.get("dtype", "bfloat16")) if dtype is None else dtype)
    made.set_progress_bar_config(disable=True)
    return made


def plain_name(name: str) -> str:
    """The pipeline that a modular one is the like of: what is said of it holds for both."""
    return name.replace("ModularPipeline", "Pipeline")


def modular(name: str):
    """A modular pipeline with random weights, its blocks those that upstream has for its class."""
    import torch

    pipe = families.modular()[name]()
    said = overrides(plain_name(name))
    parts = {}
    for part in pipe.component_names:
        if is_loaded(pipe, part):
            kind = pipe.get_component_spec(part).type_hint
            parts[part] = components.component((kind,), said.get(part, {}))
    update(pipe, parts)
    for model in pipe.components.values():
        if isinstance(model, torch.nn.Module):
            model.to(dtype=getattr(torch, said.get("dtype", "bfloat16")))
    return pipe


def update(pipe, parts: dict[str, Any]) -> None:
    """Give a modular pipeline its components; 0.35 takes only such that say where they were loaded from."""
    import diffusers
    from packaging.version import Version

    if Version(diffusers.__version__) < Version("0.36"):
        for part, component in parts.items():
            if part in pipe.component_names and is_loaded(pipe, part):
                component._diffusers_load_id = f"tiny|{part}|null|null"
    pipe.update_components(**parts)


def is_loaded(pipe, part: str) -> bool:
    """Whether a component of a modular pipeline comes from a checkpoint; the others it makes itself."""
    return pipe.get_component_spec(part).default_creation_method == "from_pretrained"


def _is_needed(part: str) -> bool:
    """Whether an optional component is one that people load all the same."""
    return bool(re.fullmatch(r"(text_encoder|tokenizer)(_\d)?|transformer|vae|unet|scheduler", part))


def settings(pipe) -> dict[str, Any]:
    """The arguments of the constructor that are no components: as the pipeline keeps them, or as they were given.

    Upstream counts no component among the optional ones that its class does not list; it holds them all the same.
    """
    parameters = inspect.signature(type(pipe).__init__).parameters
    kept = {name: getattr(pipe, name, value) for name, value in pipe.config.items()}
    known = {**overrides(type(pipe).__name__), **kept}
    return {
        name: copy.deepcopy(value)
        for name, value in known.items()
        if name in parameters and name not in pipe.components
    }
