"""One pipeline with one backend: quantized, saved, loaded, and run in every placement.

The output must be that of the same quantized pipeline on one device, bit for bit, and nothing may be left behind. A
placement that fails un-quantized too, with the same type of error, is upstream's.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import rig
from tests.pipelines import inputs
from tests.pipelines.forked import forked
from tests.pipelines.outcomes import EXACT, compare, outcome
from tests.pipelines.placing import place
from tests.pipelines.subject import DENOISER, PLAIN, Subject, layers, quantized_parts

# Pipelines whose text encoder has no effect on so small a picture: a long template is cut off with all of the prompt,
# a norm follows, or the denoiser has no use for a prompt of a few words.
UNSEEN = re.compile(
    r"(Audio|Music)LDM|Hunyuan(Video15|Image)|LTX2(Condition|HDR|DFR|InContext)|Latte|VQDiffusion"
)


def reference(subject: Subject, pipe, here) -> list:
    """The output of the pipeline that came to its device in one step; its quantized models must have run."""
    import torch

    pipe.to(here)
    reached: set[str] = set()
    for name, model in quantized_parts(pipe).items():
        for layer in layers(model):
            layer.register_forward_hook(functools.partial(_note, reached, name))
        model.register_forward_hook(functools.partial(_assert_number, name))
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


def _assert_number(name: str, model, arguments, output) -> None:
    # What comes after may hide it: a picture has no NaN.
    if any(bool(tensor.isnan().any()) for tensor in inputs.flatten(output)):
        raise AssertionError(f"the output of {name} is not a number")


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

    def assert_effect(self) -> None:
        """Raises AssertionError where a model that runs could be wrong and the output right."""
        for part, model in quantized_parts(self.pipe).items():
            if DENOISER.fullmatch(part) or not UNSEEN.match(self.subject.name):
                outputs = forked(functools.partial(self._disturbed, model))
                if outputs is not None and compare(outputs, self.expected) == EXACT:
                    raise AssertionError(f"the linear layers of {part} have no effect")

    def _disturbed(self, model) -> list | None:
        """The output with other results of the linear layers of ``model``; None if they do not run."""
        import torch

        def disturb(layer, inputs, output):
            ran.append(layer)
            return output * 1.5 + 0.5

        ran: list[torch.nn.Module] = []
        self.pipe.to(self.devices[0])
        for layer in layers(model):
            layer.register_forward_hook(disturb)
        outputs = self.subject.run(self.pipe)
        return outputs if ran else None

    def outcome(self, placement: str, beside: Source | None = None) -> str:
        """What a placement comes to; what the pipeline ``beside`` it holds on the devices does not count."""
        return outcome(lambda: forked(lambda: self._outcome(placement, beside)))

    def _outcome(self, placement: str, beside: Source | None) -> str:
        if beside is not None:  # in this process alone
            beside.pipe = None
            gc.collect()
        said = EXACT
        for outputs in self.place(self.subject, self.name, self.pipe, placement, *self.devices):
            said = compare(outputs, self.expected)
            if said != EXACT:
                break
        rig.assert_waited()
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
        source.assert_effect()
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
                without = made["plain"].outcome(placement, beside=made["quantized"])
            if _same_fault(said, without):
                said = f"upstream: {without}"
        yield placement, said


def _same_fault(said: str, plain: str) -> bool:
    """Whether the un-quantized pipeline fails alike: by the type of its error, or in the same check.

    Of bytes left behind it must leave no fewer. A device that was not waited for is nobody else's fault: fixes wait for
    plain models, too.
    """
    if rig.NOT_WAITED in said:
        return False
    (kind, size), (plain_kind, plain_size) = _fault(said), _fault(plain)
    return kind == plain_kind and size <= plain_size


def _fault(said: str) -> tuple[str, int]:
    """The type of an error, or the sentence of a failed check without its numbers; and the bytes left behind."""
    if not said.startswith("AssertionError"):
        return re.split(r"[: ]", said, maxsplit=1)[0], 0
    left = re.match(r"AssertionError: (\d+) bytes", said)
    return re.sub(r"\d\S*", "", said), int(left[1]) if left else 0
