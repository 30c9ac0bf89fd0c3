"""Which models a release will empty and which it has to keep. Nothing is changed here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..engine.classes import namespace
from ..placement.components import components_of, is_module, is_pipeline, readable_name
from ..placement.released import released_message
from .census import Census
from .trees import bearing_modules

__all__ = ["Part", "Plan", "parts_of"]


@dataclass(eq=False)
class Part:
    """One component of one target, with the other pipelines that use it.

    Attributes:
        is_hidden: whether ``gc.freeze()`` hides it, so that nobody knows who uses it.
    """

    name: str
    value: Any
    target: Any
    users: tuple[str, ...] = ()
    is_hidden: bool = False

    @functools.cached_property
    def modules(self) -> list[Any]:
        """The modules that are emptied: the component, and its submodules that have tensors."""
        return bearing_modules(self.value)

    @property
    def label(self) -> str:
        """Its name in messages: "transformer of FluxPipeline"."""
        owner = readable_name(self.target)
        return owner if self.value is self.target else f"{self.name} of {owner}"


class Plan:
    """The plan of one release.

    Attributes:
        models: the models to empty, each once.
        again: models that were released before: tensors that had to stay then may be freed now.
        kept: the models that others use.
        pipelines: the pipelines to release, including those inside combined ones.
        already: the names of targets and components that were released before.
    """

    def __init__(self, targets: list[Any], census: Census, force: bool) -> None:
        parts = list(parts_of(targets))
        self.pipelines = list(_with_inner_pipelines(targets))
        self.already = _released_before(targets, parts)
        ours = {id(pipeline) for pipeline in self.pipelines}
        self.models: list[Part] = []
        self.kept: list[Part] = []
        self.again: list[Part] = []
        for part in _distinct(part for part in parts if is_module(part.value)):
            if released_message(part.value):
                self.again.append(part)
                continue
            if not force:
                users = census.users_of(part.modules, ours)
                # A model passed by itself is released although its one pipeline is alive.
                if len(users) > (0 if is_pipeline(part.target) else 1):
                    part.users = tuple(users)
                # The model of a pipeline that is hidden may be in others that are.
                elif not census.sees(part.value) or (
                    is_pipeline(part.target) and not census.sees(part.target)
                ):
                    part.is_hidden = True
                    part.users = ("whatever gc.freeze() hides (gc.unfreeze() shows it)",)
            (self.kept if part.users else self.models).append(part)
        self._keep_what_contains_kept()
        # A pipeline of which nothing is released can still be used, and released after gc.unfreeze().
        hidden = {id(part.value) for part in self.kept if part.is_hidden}
        if hidden:
            models = [part for part in parts if is_module(part.value)]
            changed = {id(part.target) for part in models if id(part.value) not in hidden}
            unchanged = {id(part.target) for part in models} - changed
            self.pipelines = list(_with_inner_pipelines([one for one in targets if id(one) not in unchanged]))

    def _keep_what_contains_kept(self) -> None:
        """A model that contains a kept one (a PEFT wrapper) cannot be emptied without it."""
        holders = {id(module): part for part in self.kept for module in part.modules}
        for part in list(self.models):
            if not holders:
                break
            inner = next((holders[id(m)] for m in part.modules if id(m) in holders), None)
            if inner is not None:
                part.users = inner.users
                self.models.remove(part)
                self.kept.append(part)


def parts_of(targets: Iterable[Any]) -> Iterator[Part]:
    """The components of all targets.

    Raises:
        TypeError: a target is neither a pipeline nor a model.
    """
    for target in targets:
        for name, value in components_of(target, "release").items():
            yield Part(name, value, target)


def _released_before(targets: list[Any], parts: list[Part]) -> tuple[str, ...]:
    names = [readable_name(target) for target in targets if released_message(target)]
    names += [p.label for p in parts if released_message(p.value) and not released_message(p.target)]
    return tuple(dict.fromkeys(names))


def _with_inner_pipelines(targets: list[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    pending = [target for target in targets if is_pipeline(target)]
    while pending:
        pipeline = pending.pop(0)
        if id(pipeline) not in seen:
            seen.add(id(pipeline))
            yield pipeline
            pending += [value for value in list((namespace(pipeline) or {}).values()) if is_pipeline(value)]


def _distinct(parts: Iterable[Part]) -> Iterator[Part]:
    seen: set[int] = set()
    for part in parts:
        if id(part.value) not in seen:
            seen.add(id(part.value))
            yield part
