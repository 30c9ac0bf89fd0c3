"""One cycle, and the measurements between cycles."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import rig
from tests.fixes import lora_models
from tests.rig import models
from tests.sweep.backends import BACKENDS
from tests.sweep.placements import PLACEMENTS

# What the allocator of the C library and caches of libraries may add to the process over a whole run.
HOST_TOLERANCE = 48 << 20


@dataclass(frozen=True)
class Plan:
    """What one cycle does.

    Attributes:
        lora: "none", "before" the placement, "after" it, or "removed" again after a run.
        interrupt: at which call of a layer a run is interrupted; 0 for never.
        ending: "release" or "del".
    """

    backend: str
    placement: str
    lora: str
    interrupt: int
    ending: str

    def __str__(self) -> str:
        stopped = f", interrupted at call {self.interrupt}" if self.interrupt else ""
        return f"{self.backend}, {self.placement}, LoRA {self.lora}{stopped}, {self.ending}"


def plans(seed: int, number: int, backends: list[str]) -> list[Plan]:
    """The cycles of a run: every backend equally often, everything else by chance."""
    chance = random.Random(seed)
    return [
        Plan(
            backends[at % len(backends)],
            chance.choice(list(PLACEMENTS)),
            chance.choice(("none", "before", "after", "removed")),
            chance.choice((0, 0, chance.randrange(1, 30))),
            chance.choice(("release", "del")),
        )
        for at in range(number)
    ]


class Interrupted(BaseException):
    """As Ctrl-C: nothing that catches `Exception` may swallow it."""


class Soak:
    """The state that lasts from cycle to cycle.

    Args:
        gpu: what the fixture ``gpu`` gives.
        folder: where the checkpoint is written.
    """

    def __init__(self, gpu: Any, folder: Path) -> None:
        import torch

        self._torch = torch
        self._gpu = gpu
        self._saved = models.saved(models.flux_transformer(), folder / "flux")
        self._lora = lora_models.weights()
        self._references: dict[tuple[str, bool], Any] = {}
        self._kept: dict[Any, int] = {}

    def warm_up(self, backends: list[str]) -> None:
        """Run each backend once, never moved, with and without the LoRA: the outputs that every cycle must have."""
        for backend in backends:
            for lora in (False, True):
                pipeline = self._pipeline(backend)
                pipeline.to(self._gpu.devices[0])
                if lora:
                    self._add_lora(pipeline)
                self._references[backend, lora] = self._run(pipeline, self._gpu.devices[0])
                del pipeline
        # bitsandbytes keeps the code of nested quant states, 1024 bytes a device
        self._kept = {device: self._gpu.allocated(device) for device in self._gpu.devices}

    def cycle(self, plan: Plan) -> list[str]:
        """One cycle; what was wrong, as sentences."""
        import diffusers_quantfix

        wrong = []
        here, there = self._gpu.devices[0], self._gpu.devices[-1]
        pipeline = self._pipeline(plan.backend)
        if plan.placement == "stay":
            pipeline.to(here)
        if plan.lora in ("before", "removed"):
            self._add_lora(pipeline)
        device = PLACEMENTS[plan.placement](pipeline, here, there)
        if plan.lora == "after":
            self._add_lora(pipeline)
        if plan.interrupt:
            self._interrupted(pipeline, device, plan.interrupt)
        if not self._equal(self._run(pipeline, device), plan.backend, plan.lora != "none"):
            wrong.append("another output than that of the model that was never moved")
        if plan.lora == "removed":
            pipeline.unload_lora_weights()
            if not self._equal(self._run(pipeline, device), plan.backend, False):
                wrong.append("another output than without a LoRA, after it was removed")
        if plan.ending == "release":
            scheduler = pipeline.scheduler
            diffusers_quantfix.release(pipeline)
            vars(scheduler).clear()  # `release` leaves it as it is, with its timesteps on the device
            if left := self._left():
                wrong.append(f"after release: {left}")
        del pipeline
        if left := self._left():
            wrong.append(f"at the end: {left}")
        return wrong

    def tensors(self) -> Counter[tuple[str, str]]:
        """How many tensors of which type are alive on which device."""
        gc.collect()
        found: Counter[tuple[str, str]] = Counter()
        for thing in gc.get_objects():
            if issubclass(type(thing), self._torch.Tensor):
                found[type(thing).__name__, thing.device.type] += 1
        return found

    def device_bytes(self) -> str:
        """What lies on each device, for people."""
        return ", ".join(f"{device} {self._gpu.allocated(device)} bytes" for device in self._gpu.devices)

    def _pipeline(self, backend: str) -> Any:
        return models.flux_pipeline(BACKENDS[backend](self._saved, self._torch.bfloat16, None))

    def _add_lora(self, pipeline: Any) -> None:
        weights = {name: tensor.clone() for name, tensor in self._lora.items()}
        pipeline.load_lora_weights(weights, adapter_name="one")

    def _run(self, pipeline: Any, device: Any) -> Any:
        return models.call_flux(pipeline, device=device, dtype=self._torch.bfloat16).cpu()

    def _equal(self, output: Any, backend: str, lora: bool) -> bool:
        return bool(self._torch.equal(output, self._references[backend, lora]))

    def _interrupted(self, pipeline: Any, device: Any, at: int) -> None:
        """A run that ends in the middle of the forward pass, at the layer call number ``at``, if there are so many."""
        calls = 0

        def stop(module: Any, arguments: Any, output: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Interrupted

        leaves = [module for module in pipeline.transformer.modules() if not list(module.children())]
        handles = [module.register_forward_hook(stop) for module in leaves]
        with contextlib.suppress(Interrupted):
            self._run(pipeline, device)
        for handle in handles:
            handle.remove()

    def _left(self) -> dict[str, int]:
        now = {device: self._gpu.allocated(device) - kept for device, kept in self._kept.items()}
        return {str(device): more for device, more in now.items() if more}


def host_bytes() -> int:
    """The memory of this process that is in use, in bytes; what the C library has free is given back first."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * 4096


def run(
    gpu: Any, folder: Path, backends: list[str], cycles: list[Plan], say: Callable[[str], None]
) -> list[str]:
    """All cycles; what was wrong, as sentences with the cycle that did it."""
    soak = Soak(gpu, folder)
    soak.warm_up(backends)
    wrong = []
    tensors = host = None
    say(f"before the first cycle: {soak.device_bytes()}; {host_bytes() >> 20} MiB of host memory")
    for number, plan in enumerate(cycles, start=1):
        found = [f"cycle {number} ({plan}): {what}" for what in soak.cycle(plan)]
        wrong += found
        if number == len(cycles) // 2:  # by then what a library keeps once is kept
            tensors, host = soak.tensors(), host_bytes()
        say("\n".join(found) or f"{number} of {len(cycles)}: {plan}: {host_bytes() >> 20} MiB")
        rig.assert_waited()
    say(f"after the last cycle: {soak.device_bytes()}; {host_bytes() >> 20} MiB of host memory")
    if more := soak.tensors() - (tensors or Counter()):
        wrong.append(f"more tensors than after half of the cycles: {dict(more)}")
    if host is not None and host_bytes() - host > HOST_TOLERANCE:
        wrong.append(f"{(host_bytes() - host) >> 20} MiB more host memory than after half of the cycles")
    return wrong
