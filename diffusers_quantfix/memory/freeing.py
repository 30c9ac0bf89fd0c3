"""`release` and `releasing`: free the memory of models and pipelines now, and name what still holds some of it."""

from __future__ import annotations

import gc
import sys
import time
import types
from typing import TYPE_CHECKING, Any

from ..engine.classes import class_name
from ..engine.locks import Lock
from ..placement.components import accelerators_first, is_module, is_pipeline
from ..placement.released import message_for, message_for_pipeline, released_message
from ..torch_modes import unobserved
from .report import Bystander, Kept, Release, Survivor

if TYPE_CHECKING:
    from .emptying import Block
    from .plan import Part

__all__ = ["release", "releasing"]

_MOST_BYSTANDERS = 8
_TICK = 0.01
# A walk over the heap briefly holds a reference to every tensor, including those that another thread releases.
_one_at_a_time = Lock()


def release(
    *pipes_or_models: Any, verify: bool = True, force: bool = False, wait: float = 10.0, search: float = 1.5
) -> Release:
    """Remove the weights from pipelines or models: their memory is freed although variables still refer to them.

    The models lose their weights, everything that belongs to these (quant states, caches, attributes with tensors) and
    their offload hooks; a later use raises `ReleasedError`. Nothing else is changed: schedulers and tokenizers stay,
    and other references to a model's tensors stay valid. A variable, an optimizer, a state dict, a NumPy array, an
    autograd graph or the traceback of an error keeps the memory of its tensor: that is a survivor, reported with the
    chain of references up to a variable. Delete that variable to free the memory.

    A component that another live pipeline uses is kept and named, unless ``force``. So is one that ``gc.freeze()``
    hides, or whose pipeline it hides, since others that use it may be hidden too. A model passed by itself is released
    although its own pipeline is alive; it is kept if two or more pipelines use it.

    Another model that has a layer of a released one, or a variable that has it, is no such user: the layer has no
    weights any more, and its use raises `ReleasedError`. A shallow copy (``copy.copy``) of a layer keeps the weights.

    A thread that is inside the model gets `ReleasedError` at the next layer (AttributeError inside one): let it finish
    first. While captured graphs (CUDA, XPU) are alive, tensors on their devices stay, since the graphs may read them.

    Args:
        pipes_or_models: diffusers pipelines, ``torch.nn.Module`` objects, or dicts of components. They may be
            offloaded, device-mapped, group-offloaded, quantized or PEFT-wrapped; None is skipped.
        verify: search for the holders of survivors, and for other tensors on the same devices. It walks the heap a few
            times, which takes from tenths of a second to a few seconds.
        force: release shared components too.
        wait: if memory is left, the most seconds to wait for other threads to leave their models.
        search: the most seconds to search for holders; a chain without an owner by then ends with "search cut".

    Returns:
        What was freed, what was kept, and what survived. Releasing again is not an error.

    Raises:
        TypeError: an argument is neither a pipeline nor a model, or ``wait`` or ``search`` no number; nothing is
            released then.
        ValueError: ``wait`` or ``search`` is negative or not a number of seconds; nothing is released then.
    """
    _check_seconds(wait=wait, search=search)
    targets = _checked(pipes_or_models)
    if not targets:
        return Release(freed={})
    until = time.monotonic() + wait
    with _one_at_a_time.held:
        releasing = _Releasing(targets, force)
        releasing.carry_out()
    releasing.wait(until)
    with _one_at_a_time.held:
        return releasing.report(verify, search)


class releasing:
    """Context manager that releases pipelines or models at the end of the block, also when the block raises.

        with qf.releasing(pipe) as handle:
            image = pipe("a fox").images[0]
        print(handle.report)

    Args:
        pipes_or_models, verify, force, wait, search: as in `release`.

    Attributes:
        report: the result of `release`; None inside the block.

    Raises:
        TypeError, ValueError: as from `release`; raised by the constructor.
        RuntimeError: the same object is used for a second block.
    """

    def __init__(
        self,
        *pipes_or_models: Any,
        verify: bool = True,
        force: bool = False,
        wait: float = 10.0,
        search: float = 1.5,
    ) -> None:
        _check_seconds(wait=wait, search=search)
        self._targets: tuple[Any, ...] = tuple(_checked(pipes_or_models))
        self._options: dict[str, Any] = {"verify": verify, "force": force, "wait": wait, "search": search}
        self.report: Release | None = None
        self._used = False

    def __enter__(self) -> releasing:
        if self._used:
            raise RuntimeError(
                "a releasing() object serves one block; make a new one: with releasing(...) as handle"
            )
        self._used = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        targets, self._targets = self._targets, ()
        try:
            self.report = release(*targets, **self._options)
        except Exception:
            if error is None:
                raise  # otherwise the block's own error is raised


def _check_seconds(**options: Any) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"release() takes a number of seconds as {name}, not {value!r}")
        if not value >= 0:
            raise ValueError(f"release() takes 0 or more seconds as {name}, not {value!r}")


def _checked(targets: tuple[Any, ...]) -> list[Any]:
    """The targets that are not None; [] without any model or pipeline, or at the end of the interpreter. Does not need
    torch.

    Raises:
        TypeError: a target is neither a pipeline nor a model.
    """
    if sys.meta_path is None:  # in a destructor at the end: nothing can be imported, and all memory is freed
        return []
    from ..placement.components import components_of

    wanted = [target for target in targets if target is not None]
    parts = [value for target in wanted for value in components_of(target, "release").values()]
    # Without a model or pipeline there is nothing to free, and torch may not be installed.
    return wanted if any(map(is_module, parts)) or any(map(is_pipeline, wanted)) else []


class _Releasing:
    """One release: `Plan` decides, and nothing is changed before `carry_out`.

    Attributes:
        left: the storages that are not freed yet.
    """

    # `unobserved` is what reads and empties tensors, not the collections: they run finalizers of the program.

    def __init__(self, targets: list[Any], force: bool) -> None:
        self.left: list[Block] = []
        self._make_plan(targets, force)
        self.collected = bool(self.plan.kept)
        if self.collected:
            # Their users may be garbage.
            del self.census, self.plan
            gc.collect()
            self._make_plan(targets, force)

    @unobserved
    def _make_plan(self, targets: list[Any], force: bool) -> None:
        from .census import Census
        from .plan import Plan

        self.census = Census()
        self.plan = Plan(targets, self.census, force)

    def carry_out(self) -> None:
        """Guard and empty the models of the plan."""
        self._carry_out()
        # Host memory alone can wait for the next collection.
        if self.left or (self.before and not self.collected):
            gc.collect()
            self.left = _left(self.left)

    @unobserved
    def _carry_out(self) -> None:
        from ..placement.tensors import held_tensors
        from . import accelerators, emptying
        from .census import library_constants

        plan = self.plan
        self.captured = self.census.captured()
        self.blocks = blocks = emptying.blocks_of(
            held for part in (*plan.models, *plan.again) for held in held_tensors(part.name, part.value)
        )
        self.constants = {
            blocks.pop(key).path: why for key, why in library_constants().items() if key in blocks
        }
        counted = accelerators.devices()
        accelerators.synchronize(counted)
        self.before = {device: accelerators.allocated(device) for device in counted}
        self._change()
        self.kept = tuple([_kept(part) for part in plan.kept])
        self.names, self.already = tuple([part.label for part in plan.models]), plan.already
        del plan, self.census, self.plan  # the search for holders would find them
        self.left = _left(list(blocks.values()))

    def wait(self, until: float) -> None:
        """If memory is left, wait for other threads to leave their models, up to ``until`` (``time.monotonic()``)."""
        from .frames import in_a_model

        inside = bool(self.left) and in_a_model()
        while self.left and inside and time.monotonic() < until:
            time.sleep(_TICK)
            # Check this before the memory: the output of a call briefly outlives the call's frames.
            inside = in_a_model()
            if not inside:
                time.sleep(_TICK)
            self.left = _left(self.left)

    @unobserved
    def report(self, verify: bool, search: float) -> Release:
        """The result; arguments as for `release`."""
        from . import accelerators

        blocks, before, left = self.blocks, self.before, _left(self.left)
        devices = sorted({block.device for block in blocks.values()})
        if before:
            accelerators.empty_caches({device.partition(":")[0] for device in [*devices, *before]})
        freed: dict[str, int] = {}
        surviving = set(map(id, left))
        for block in blocks.values():
            if id(block) not in surviving:
                freed[block.device] = freed.get(block.device, 0) + block.bytes
        search_until = time.monotonic() + search
        return Release(
            released=self.names,
            freed=dict(sorted(freed.items(), key=lambda item: accelerators_first(item[0]))),
            kept=self.kept,
            survivors=_survivors(left, self.captured, verify, search_until),
            bystanders=_bystanders(
                {device for device in devices if device != "cpu"}, set(blocks), search_until
            )
            if verify
            else (),
            allocated={device: (count, accelerators.allocated(device)) for device, count in before.items()},
            already=self.already,
            constants=self.constants,
        )

    def _change(self) -> None:
        from .emptying import give_up
        from .guard import guard_module, guard_pipeline
        from .unhooking import forget_in_managers, strip, unlink

        plan = self.plan
        parts = [*plan.models, *plan.again]  # an earlier release may have been interrupted halfway
        # All guards first: calls that begin now are refused.
        for part in parts:
            guard_module(part.value, part.modules, released_message(part.value) or message_for(part.label))
        for pipeline in plan.pipelines:
            if not released_message(pipeline):
                guard_pipeline(pipeline, message_for_pipeline(class_name(type(pipeline))))
        released = {id(module) for part in parts for module in part.modules}
        for part in parts:
            strip(part.modules)
        for part in plan.kept:
            unlink(part.value, released)
        forget_in_managers(self.census, released)
        for part in parts:
            give_up(part.value, part.modules, self.captured)


def _left(blocks: list[Block]) -> list[Block]:
    from .emptying import is_gone

    return [block for block in blocks if not is_gone(block)]


def _kept(part: Part) -> Kept:
    from ..placement.auditing import audit

    return Kept(part.label, class_name(type(part.value)), part.users, audit(part.value).bytes)


def _survivors(blocks: list[Block], captured: set[str], verify: bool, until: float) -> tuple[Survivor, ...]:
    if not blocks:
        return ()
    from .holders import holders_of_storages

    blocks = sorted(blocks, key=lambda block: -block.bytes)
    chains = holders_of_storages(blocks, until) if verify else [[] for _ in blocks]
    return tuple(
        [
            Survivor(block.path, block.device, block.bytes, _reason(block, captured), tuple(found))
            for block, found in zip(blocks, chains, strict=True)
        ]
    )


def _reason(block: Block, captured: set[str]) -> str:
    if block.device.partition(":")[0] in captured:
        return "a captured graph may read it (its reset() frees it)"
    return "something else holds it"


def _bystanders(devices: set[str], known: set[int], until: float) -> tuple[Bystander, ...]:
    """The largest tensors on ``devices`` that are neither survivors nor part of a live module."""
    if not devices:
        return ()
    from ..placement.tensors import device_name, storage_of
    from .census import Census
    from .holders import holders

    census = Census()
    known = known | census.weights()
    largest: dict[int, tuple[int, Any]] = {}
    tensor: Any = None
    for tensor in census.tensors:
        storage = storage_of(tensor)
        if storage is None or not storage.nbytes() or storage._cdata in known:
            continue
        if device_name(storage.device) in devices:
            largest.setdefault(storage._cdata, (storage.nbytes(), tensor))
    del census  # the search for holders would find it
    most = sorted(largest.values(), key=lambda found: -found[0])[:_MOST_BYSTANDERS]
    largest.clear()
    tensors = [tensor for _, tensor in most]
    sizes = [size for size, _ in most]
    del tensor, most
    answers = []
    for size, tensor, chains in zip(sizes, tensors, holders(tensors, until, most=1), strict=True):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        answers.append(Bystander(dtype, shape, str(tensor.device), size, tuple(chains)))
    return tuple(answers)
