"""`release` and `releasing`: free the memory of a pipeline or model now, whoever still points at it."""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING, Any

from ..placement.components import accelerators_first, is_module, is_pipeline
from .report import Bystander, Kept, Release, Survivor

if TYPE_CHECKING:
    from .emptying import Block
    from .plan import Part, Plan

__all__ = ["release", "releasing"]

_MOST_BYSTANDERS = 8


def release(*pipes_or_models: Any, verify: bool = True, force: bool = False) -> Release:
    """Free all memory of pipelines or models now, although variables, hooks, caches or tracebacks still point at them.

    What is released is emptied in place: its weights, everything that belongs to them, what offload hooks keep aside,
    and every other tensor object that shares their memory. A later use raises `ReleasedError`. Frames of failed calls
    through it (the traceback of an out-of-memory error) lose their locals. Schedulers and tokenizers stay usable,
    their tensors go to the CPU.

    A component that another live pipeline uses is kept and named, unless ``force``. A model that is given by itself
    is released although its own pipeline is alive; it is kept if two or more pipelines use it.

    Holders are found through the garbage collector; for that, what ``gc.freeze()`` had put aside is unfrozen.

    Args:
        pipes_or_models: diffusers pipelines, ``torch.nn.Module`` objects, or dicts of components. Offloaded,
            device-mapped, group-offloaded, quantized and PEFT-wrapped ones as well; None is skipped.
        verify: look for what holds survivors, and for other tensors on the same devices. It walks the heap a few
            times, which takes from tenths of a second to some seconds.
        force: release shared components and shared weights, too.

    Returns:
        What was freed, what was kept, and what survived. Releasing again frees nothing and is no error.

    Raises:
        TypeError: something is no pipeline and no model; nothing has been released then.
    """
    targets = _checked(pipes_or_models)
    if not targets:
        return Release(freed={})
    from .census import Census
    from .plan import Plan

    census = Census()
    plan = Plan(targets, census, force)
    return _carry_out(plan, census, verify, force)


class releasing:
    """Context manager that releases pipelines or models at the end of the block, also when the block raises.

        with qf.releasing(pipe) as handle:
            image = pipe("a fox").images[0]
        print(handle.report)

    Args:
        pipes_or_models, verify, force: as in `release`.

    Attributes:
        report: what `release` returned; None inside the block.

    Raises:
        TypeError: at once, for something that is no pipeline and no model.
    """

    def __init__(self, *pipes_or_models: Any, verify: bool = True, force: bool = False) -> None:
        self._targets: tuple[Any, ...] = tuple(_checked(pipes_or_models))
        self._verify, self._force = verify, force
        self.report: Release | None = None

    def __enter__(self) -> releasing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        targets, self._targets = self._targets, ()
        self.report = release(*targets, verify=self._verify, force=self._force)


def _checked(targets: tuple[Any, ...]) -> list[Any]:
    """The targets that are not None; TypeError for what is no model, before torch is asked for anything."""
    from ..placement.components import components_of

    wanted = [target for target in targets if target is not None]
    parts = [value for target in wanted for value in components_of(target, "release").values()]
    # Without a model or a pipeline there is nothing to free, and perhaps no torch.
    return wanted if any(map(is_module, parts)) or any(map(is_pipeline, wanted)) else []


def _carry_out(plan: Plan, census: Any, verify: bool, force: bool) -> Release:
    from ..placement.tensors import held_tensors
    from . import accelerators, emptying
    from .census import library_constants

    blocks = emptying.blocks_of(
        [held for part in plan.models for held in held_tensors(part.name, part.value)]
    )
    constants = {
        blocks.pop(address).path: why for address, why in library_constants().items() if address in blocks
    }
    released = set(plan.modules())
    if not force:
        for address, owner in census.other_owners(blocks, released).items():
            blocks[address].spared = owner
    kept = tuple([_kept(part) for part in plan.kept])
    devices = sorted({block.device for block in blocks.values()})
    counted = accelerators.devices()
    accelerators.synchronize(devices)
    before = {device: accelerators.allocated(device) for device in counted}

    names, already = tuple(part.label for part in plan.models), plan.already
    _change(plan, census, blocks, released)
    del census, plan  # they hold every module of the process, and the search for holders would meet them
    gc.collect()
    accelerators.empty_caches({device.partition(":")[0] for device in [*devices, *counted]})
    freed: dict[str, int] = {}
    survivors: list[Block] = []
    for block in blocks.values():
        if emptying.is_gone(block):
            freed[block.device] = freed.get(block.device, 0) + block.bytes
        else:
            survivors.append(block)
    return Release(
        released=names,
        freed=dict(sorted(freed.items(), key=lambda item: accelerators_first(item[0]))),
        kept=kept,
        survivors=_survivors(survivors, verify),
        bystanders=_bystanders({device for device in devices if device != "cpu"}, blocks) if verify else (),
        allocated={device: (before[device], accelerators.allocated(device)) for device in counted},
        already=already,
        constants=constants,
    )


def _change(plan: Plan, census: Any, blocks: dict[int, Block], released: set[int]) -> None:
    """All that a release changes. No step raises, so that none is left out."""
    from ..placement.tensors import held_tensors
    from . import emptying
    from .failed_calls import clear_failed_calls
    from .guard import guard_module, guard_pipeline, message_for, released_message
    from .hooks import forget_in_managers, strip, unlink

    for part in plan.models:
        strip(part.value)
    for part in plan.kept:
        unlink(part.value, released)
    forget_in_managers(census, released)
    emptying.empty(blocks)
    for part in plan.models:
        guard_module(part.value, message_for(part.label))
    for part in plan.others:
        emptying.to_cpu(tensor.tensor for tensor in held_tensors(part.name, part.value))
    for pipeline in plan.pipelines:
        if not released_message(pipeline):
            vars(pipeline).pop("_all_hooks", None)
            guard_pipeline(pipeline, message_for(type(pipeline).__name__))
    clear_failed_calls(census.tracebacks, released | {id(pipeline) for pipeline in plan.pipelines})


def _kept(part: Part) -> Kept:
    from ..placement.auditing import audit

    return Kept(part.label, type(part.value).__name__, part.users, audit(part.value).bytes)


def _survivors(blocks: list[Block], verify: bool) -> tuple[Survivor, ...]:
    from .emptying import tensor_of
    from .holders import holders

    tensors = [tensor_of(block) for block in blocks] if verify else []
    found = holders([tensor for tensor in tensors if tensor is not None])
    chains = [["something that Python cannot see"] if tensor is None else found.pop(0) for tensor in tensors]
    # Lists first: a tuple that is being built can be met by the search, and must not be referred to.
    answers = [
        Survivor(
            block.path,
            block.device,
            block.bytes,
            block.spared or block.error or "its memory could not be freed",
            tuple(chains[index] if verify else ()),
        )
        for index, block in enumerate(blocks)
    ]
    return tuple(answers)


def _bystanders(devices: set[str], blocks: dict[int, Block]) -> tuple[Bystander, ...]:
    """The largest tensors on ``devices`` that are neither a survivor nor part of a live module."""
    from ..placement.tensors import storage_of
    from .census import device_tensors, weights_of_live_modules
    from .holders import holders

    if not devices:
        return ()
    known = weights_of_live_modules() | set(blocks)
    largest: dict[int, tuple[int, Any]] = {}
    tensor: Any = None
    for tensor in device_tensors(devices):
        storage = storage_of(tensor)
        if storage is not None and storage.nbytes() and storage._cdata not in known:
            largest.setdefault(storage._cdata, (storage.nbytes(), tensor))
    most = sorted(largest.values(), key=lambda found: -found[0])[:_MOST_BYSTANDERS]
    largest.clear()
    tensors = [tensor for _, tensor in most]
    sizes = [size for size, _ in most]
    del tensor, most
    answers = []
    for size, tensor, chains in zip(sizes, tensors, holders(tensors, most=1), strict=True):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        answers.append(Bystander(dtype, shape, str(tensor.device), size, tuple(chains)))
    return tuple(answers)
