"""A random program, and its run beside a twin that is never moved."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import rig
from tests.fixes import lora_models
from tests.rig import models, slow
from tests.sweep.backends import BACKENDS
from tests.sweep.test_caching import CACHES, STEPS, _cached

STEPS_OF_PROGRAMS = (
    *(
        "run",
        "run",
        "cache",
        "lora",
        "lora",
        "fuse",
        "stop",
        "stop",
        "train",
        "train_lora",
        "stop_train",
        "grad",
        "weights",
    ),
    *("other", "nested"),
)
LAYERS = {"num_layers": 2, "num_single_layers": 2}


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: it comes from.
        options: of ``enable_group_offload``.
        steps: names of `Side`'s methods, with arguments.
    """

    seed: int
    backend: str
    options: dict[str, Any]
    steps: tuple[tuple, ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        steps = ", ".join(" ".join(map(str, step)) for step in self.steps)
        return f"seed {self.seed}: {self.backend}, {options}: {steps}"


def program(seed: int, backends: list[str]) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    level = chance.choice(("leaf_level", "block_level"))
    options: dict[str, Any] = {"offload_type": level, "use_stream": True}
    if level == "block_level":
        # Two blocks of a group and a stream are refused by diffusers.
        options["num_blocks_per_group"] = 1
    if chance.random() < 0.4:
        options["record_stream"] = True
    if chance.random() < 0.3:
        options["low_cpu_mem_usage"] = True
    if chance.random() < 0.15:
        options = {"offload_type": level, "non_blocking": chance.random() < 0.5}
        if level == "block_level":
            options["num_blocks_per_group"] = 2
    steps: list[tuple] = [("run",)] if chance.random() < 0.8 else []
    cached, loras, fused = False, 0, False
    for _ in range(chance.randrange(3, 10)):
        step = chance.choice(STEPS_OF_PROGRAMS)
        if step == "cache":
            steps.append(("uncache",) if cached else ("cache", chance.choice(list(CACHES))))
            cached = not cached
        elif step == "lora":
            steps.append(("load_lora", loras) if loras < 2 and chance.random() < 0.7 else ("unload_lora",))
            loras, fused = (loras + 1, fused) if steps[-1][0] == "load_lora" else (0, False)
        elif step == "fuse":
            if loras and chance.random() < 0.5:
                steps.append(("unfuse",) if fused else ("fuse",))
                fused = not fused
        elif step == "stop":
            error = chance.choice(("RuntimeError", "KeyboardInterrupt"))
            steps.append(("stop", error, chance.randrange(1, 60), chance.choice(("before", "behind"))))
        elif step in ("train", "train_lora", "stop_train"):
            # Autograd finds weights where they were brought back to, except block by block: of several blocks of a
            # group, the last one runs first in a backward pass, and diffusers brings them for the first one.
            alone = options.get("num_blocks_per_group") == 1
            if alone and not cached and (loras or step != "train_lora"):
                steps.append((step, chance.randrange(1, 90)) if step == "stop_train" else (step,))
        elif step == "nested":
            steps.append((step, chance.randrange(1, 60)))
        else:
            steps.append((step,))
    return Program(seed, chance.choice(backends), options, (*steps, ("run",), ("weights",)))


@dataclass
class Side:
    """One of the two models, and all that it gave."""

    pipe: Any
    other: Any
    device: Any
    dtype: Any
    disable: Callable | None = None
    seen: list = field(default_factory=list)

    def run(self) -> None:
        self.seen.append(self._call(self.pipe))

    def other_run(self) -> None:
        self.seen.append(self._call(self.other))

    def _call(self, pipe: Any) -> Any:
        return models.call_flux(pipe, device=self.device, dtype=self.dtype, steps=STEPS).cpu()

    def cache(self, name: str) -> None:
        self.disable = _cached(name)(self.pipe)

    def uncache(self) -> None:
        assert self.disable is not None
        self.disable()

    def load_lora(self, number: int) -> None:
        """One more; all of them are used."""
        names = lora_models.NAMES[: number + 1]
        weights = {name: tensor.clone() for name, tensor in lora_models.weights(1 + number).items()}
        self.pipe.load_lora_weights(weights, adapter_name=names[number])
        self.pipe.set_adapters(list(names), [0.5] * len(names))

    def unload_lora(self) -> None:
        self.pipe.unload_lora_weights()

    def fuse(self) -> None:
        self.pipe.fuse_lora()

    def unfuse(self) -> None:
        self.pipe.unfuse_lora()

    def nested(self, at: int) -> None:
        """The other pipeline runs at call ``at`` of a layer of this one."""
        with self._at(at, "register_forward_hook", self.other_run):
            self.run()

    def stop(self, error: str, at: int, when: str) -> None:
        """A run that ends at call ``at`` of a layer, before the layer or behind it."""

        def end() -> None:
            raise {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[error]("stopped")

        hook = "register_forward_pre_hook" if when == "before" else "register_forward_hook"
        with self._at(at, hook, end):
            try:
                self._call(self.pipe)
            except (RuntimeError, KeyboardInterrupt) as stopped:
                if str(stopped) != "stopped":
                    raise

    @contextlib.contextmanager
    def _at(self, at: int, hook: str, what: Callable[[], None]) -> Iterator[None]:
        """In the block ``what`` is called at call ``at`` of a layer."""
        calls = 0

        def count(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                what()

        leaves = [module for module in self.pipe.transformer.modules() if not list(module.children())]
        handles = [getattr(module, hook)(count) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def train(self) -> None:
        """The gradient of the inputs, block by block, as groups of blocks must be trained."""
        self._train([])

    def stop_train(self, at: int) -> None:
        """The same until call ``at`` of a layer, forward or, as checkpointing calls it again, backward."""

        def end() -> None:
            raise RuntimeError("stopped")

        with self._at(at, "register_forward_pre_hook", end):
            try:
                self._train([])
            except RuntimeError as stopped:
                if str(stopped) != "stopped":
                    raise
        self._trained()

    def train_lora(self) -> None:
        """The gradients of the LoRA as well."""
        self._train([name for name, _ in self.pipe.transformer.named_parameters() if "lora_" in name])

    def _train(self, names: list[str]) -> None:
        model = self.pipe.transformer
        model.enable_gradient_checkpointing()
        model.train()
        model.requires_grad_(False)
        trained = [model.get_parameter(name).requires_grad_() for name in names]
        inputs = self._inputs()
        hidden = inputs["hidden_states"].requires_grad_()
        output = model(**inputs)[0]
        output.float().sum().backward()
        self.seen += [output.detach().cpu(), hidden.grad.cpu()]
        self.seen += [None if parameter.grad is None else parameter.grad.cpu() for parameter in trained]
        self._trained()

    def _trained(self) -> None:
        model = self.pipe.transformer
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)
        model.disable_gradient_checkpointing()
        model.eval()

    def grad(self) -> None:
        """Passes in which gradients are enabled and nothing is trained."""
        model = self.pipe.transformer
        with model.cache_context("late"):
            for _ in range(STEPS):
                self.seen.append(model(**self._inputs())[0].detach().cpu())

    def _inputs(self) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(0)

        def values(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        return {
            "hidden_states": values(1, 4, 64),
            "encoder_hidden_states": values(1, 8, 64),
            "pooled_projections": values(1, 64),
            "timestep": torch.ones(1, device=self.device, dtype=self.dtype),
            "img_ids": torch.zeros(4, 3, device=self.device, dtype=self.dtype),
            "txt_ids": torch.zeros(8, 3, device=self.device, dtype=self.dtype),
            "return_dict": False,
        }

    def weights(self) -> None:
        for name, tensor in sorted(self.pipe.transformer.state_dict().items()):
            self.seen += [part.cpu() for part in parts(tensor)] or [name]


def parts(tensor: Any) -> Iterator[Any]:
    """The plain tensors that a weight consists of."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))
    else:
        yield tensor.detach().as_subclass(torch.Tensor)


def saved(folder: Path) -> Path:
    """The checkpoint of all programs."""
    return models.saved(models.flux_transformer(**LAYERS), folder / "flux")


def run(folder: Path, what: Program) -> list[str]:
    """What was wrong, as sentences; on the rig, or on a real device where there is one."""
    import torch

    torch.set_num_threads(1)
    real = torch.cuda.is_available()
    with slow.streams(what.seed) if real else rig.devices(late=True):
        device = torch.device("cuda", 0)
        sides = [_side(folder, what.backend, device) for _ in range(2)]
        mine, twin = sides
        for pipe in (mine.pipe, mine.other):
            pipe.transformer.enable_group_offload(
                onload_device=device, offload_device=torch.device("cpu"), **what.options
            )
        for side in (twin.pipe, twin.other):
            side.to(device)
        wrong = _steps(what, mine, twin)
        wrong += [] if real else [str(hazard) for hazard in rig.hazards()]
        del sides, mine, twin, pipe, side
    return wrong


def _side(folder: Path, backend: str, device: Any) -> Side:
    import torch

    dtype = torch.bfloat16
    first, second = (models.flux_pipeline(BACKENDS[backend](folder, dtype, None)) for _ in range(2))
    return Side(first, second, device, dtype)


def _steps(what: Program, mine: Side, twin: Side) -> list[str]:
    import torch

    names = {"other": "other_run"}
    for number, (name, *arguments) in enumerate(what.steps, start=1):
        said = f"step {number}, {name}"
        method = names.get(name, name)
        if error := _error(getattr(twin, method), arguments):
            if not _error(getattr(mine, method), arguments):
                return [f"{said}: the twin raised {error}, this one did not"]
            return []  # what cannot be done on one device is no matter of offloading
        if error := _error(getattr(mine, method), arguments):
            return [f"{said}: {error}"]
        if len(mine.seen) != len(twin.seen):
            return [f"{said}: {len(mine.seen)} tensors, {len(twin.seen)} of the twin"]
        unequal = [
            (a, b)
            for a, b in zip(mine.seen, twin.seen, strict=True)
            if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        ]
        if unequal:
            return [
                f"{said}: {len(unequal)} of {len(mine.seen)} tensors are not the twin's, {_how(*unequal[0])}"
            ]
        mine.seen, twin.seen = [], []
    return []


def _how(a: Any, b: Any) -> str:
    if getattr(a, "shape", None) != getattr(b, "shape", None) or not hasattr(a, "shape"):
        return f"{getattr(a, 'shape', a)} and {getattr(b, 'shape', b)}"
    difference = (a.double() - b.double()).abs().max().item()
    return f"by {difference:.3g} of {b.double().abs().max().item():.3g}"


def _error(step: Callable, arguments: list) -> str:
    """What a step raised, as text."""
    try:
        step(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the libraries say about interrupted runs and caches."""
    import logging
    import warnings

    from diffusers.utils import logging as of_diffusers

    level = of_diffusers.get_verbosity()
    of_diffusers.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        of_diffusers.set_verbosity(level)
