"""`release` and `releasing`: free the memory of a pipeline or model now, whoever still points at it."""

from __future__ import annotations

import gc
import time
import types
from typing import TYPE_CHECKING, Any

from ..placement.components import accelerators_first, is_module, is_pipeline
from ..placement.modules import no_collection
from ..placement.released import message_for, released_message
from .report import Bystander, Kept, Release, Survivor

if TYPE_CHECKING:
    from .emptying import Block
    from .plan import Part
    from .threads import Inside

__all__ = ["release", "releasing"]

_MOST_BYSTANDERS = 8


def release(
    *pipes_or_models: Any, verify: bool = True, force: bool = False, wait: float = 10.0, search: float = 1.5
) -> Release:
    """Free all memory of pipelines or models now, although variables, hooks, caches or tracebacks still point at them.

    What is released is emptied in place: its weights, everything that belongs to them, what offload hooks keep aside,
    and every other tensor object that shares their memory. A later use raises `ReleasedError`. Frames of failed calls
    through it (the traceback of an out-of-memory error) lose their locals. Schedulers and tokenizers stay usable,
    their tensors go to the CPU.

    A component that another live pipeline uses is kept and named, unless ``force``. A model that is given by itself
    is released although its own pipeline is alive; it is kept if two or more pipelines use it.

    Memory that something outside of torch and Python can still reach is not freed, with ``force`` neither; it is a
    survivor of the report: a NumPy array or memoryview of a weight, a DLPack capsule, an object of CuPy or Numba, a
    ctypes object at its address, a storage that is part of another (`torch.UntypedStorage` slices), a C++ object, a
    call that computes with a weight right now, and on devices whatever a captured graph (CUDA, XPU) may read. They are
    found by counting references; `diffusers_quantfix.memory.references` says how. An address that is kept as a plain
    number (``data_ptr()``), or in C without a reference, cannot be noticed. Memory shared with other processes
    (``share_memory_``, CUDA IPC) and mapped files go from this process only: torch keeps them for the others. That of
    ``torch.from_numpy`` goes when NumPy gives it up.

    Another thread that is inside the model is waited for, and finishes; calls that begin meanwhile wait, too, and then
    raise `ReleasedError`. Noticed are threads of Python in a method of what is released or of a module around it, in
    hooks of accelerate and diffusers, in compiled functions and replicas with the same weights, and in any backward
    pass. Not noticed are threads of C++ alone, and functions of your own that compute with a weight outside of a
    module: a call of theirs that is under way keeps its weight, which is then a survivor, and the next one gets
    torch's error about its shape. Give what is compiled a moment without calls: calls to it do not wait.

    What holds a tensor is found through the garbage collector; for that, what ``gc.freeze()`` had put aside is
    unfrozen.

    Args:
        pipes_or_models: diffusers pipelines, ``torch.nn.Module`` objects, or dicts of components. Offloaded,
            device-mapped, group-offloaded, quantized and PEFT-wrapped ones as well; None is skipped.
        verify: look for what holds survivors, and for other tensors on the same devices. It walks the heap a few
            times, which takes from tenths of a second to some seconds.
        force: release shared components and shared weights, too.
        wait: the most seconds to wait for other threads to leave.
        search: the most seconds to look for what holds survivors and other tensors; holders that are found no owner
            for by then end with "search cut".

    Returns:
        What was freed, what was kept, and what survived. Releasing again frees what is no longer held, and is no error.

    Raises:
        TypeError: something is no pipeline and no model; nothing has been released then.
        InUseError: another thread was still inside after ``wait`` seconds; nothing has been released then.
    """
    targets = _checked(pipes_or_models)
    if not targets:
        return Release(freed={})
    until = time.monotonic() + wait
    return _Releasing(targets, force, until, search if verify else 0.0).carry_out(verify, search)


class releasing:
    """Context manager that releases pipelines or models at the end of the block, also when the block raises.

        with qf.releasing(pipe) as handle:
            image = pipe("a fox").images[0]
        print(handle.report)

    Args:
        pipes_or_models, verify, force, wait, search: as in `release`.

    Attributes:
        report: what `release` returned; None inside the block.

    Raises:
        TypeError: at once, for something that is no pipeline and no model.
    """

    def __init__(
        self,
        *pipes_or_models: Any,
        verify: bool = True,
        force: bool = False,
        wait: float = 10.0,
        search: float = 1.5,
    ) -> None:
        self._targets: tuple[Any, ...] = tuple(_checked(pipes_or_models))
        self._options: dict[str, Any] = {"verify": verify, "force": force, "wait": wait, "search": search}
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
        self.report = release(*targets, **self._options)


def _checked(targets: tuple[Any, ...]) -> list[Any]:
    """The targets that are not None; TypeError for what is no model, before torch is asked for anything."""
    from ..placement.components import components_of

    wanted = [target for target in targets if target is not None]
    parts = [value for target in wanted for value in components_of(target, "release").values()]
    # Without a model or a pipeline there is nothing to free, and perhaps no torch.
    return wanted if any(map(is_module, parts)) or any(map(is_pipeline, wanted)) else []


class _Releasing:
    """One release: what it will do is decided with other threads running, and done with none inside."""

    def __init__(self, targets: list[Any], force: bool, until: float, search: float) -> None:
        self._targets = targets
        self._force = force
        self._until = until
        self._look()
        spared = [block for block in self.blocks.values() if block.spared]
        self.collected = bool(self.plan.kept or (spared and not self._are_held(spared, search)))
        if self.collected:
            # It may be garbage that uses them, as long as nobody holds it.
            del self.census, self.plan
            gc.collect()
            self._look()

    @no_collection()
    def _look(self) -> None:
        """Decide; nothing is changed."""
        from ..placement.tensors import held_tensors
        from . import emptying
        from .census import Census, library_constants
        from .plan import Plan

        self.census = Census()
        self.plan = Plan(self._targets, self.census, self._force)
        self.released = set(self.plan.modules())
        self.blocks = emptying.blocks_of(
            held
            for part in (*self.plan.models, *self.plan.again)
            for held in held_tensors(part.name, part.value)
        )
        self.constants = {
            self.blocks.pop(address).path: why
            for address, why in library_constants().items()
            if address in self.blocks
        }
        if not self._force:
            trees = self.released | {id(m) for part in self.plan.again for m in part.modules}
            for address, (owner, weight) in self.census.other_owners(self.blocks, trees).items():
                self.blocks[address].spared, self.blocks[address].tensor = owner, weight

    @no_collection()
    def _are_held(self, spared: list[Block], search: float) -> bool:
        """Whether each of these is held by a variable, and not only by what is released: then it is no garbage, and to
        collect that, which takes longer than the search, would change nothing."""
        from .holders import held

        if not search or any(block.tensor is None for block in spared):
            return False
        but = {*self.released, *map(id, self.plan.pipelines)}
        but |= {id(module) for part in self.plan.again for module in part.modules}
        chains = held([block.tensor for block in spared], time.monotonic() + search, but)
        for block, found in zip(spared, chains or (), strict=False):
            block.holders, block.tensor = tuple(found), None
        return chains is not None

    def carry_out(self, verify: bool, search: float) -> Release:
        """Do it, and say what came of it."""
        from . import accelerators, emptying

        before = self._change()
        plan, blocks = self.plan, self.blocks
        kept = tuple([_kept(part) for part in plan.kept])
        names, already, constants = tuple(part.label for part in plan.models), plan.already, self.constants
        devices = sorted({block.device for block in blocks.values()})
        del plan, self.census, self.plan  # the search for holders would meet them
        if before and not self.collected:
            gc.collect()  # without devices there is no memory that would be missed until the next collection
            accelerators.empty_caches({device.partition(":")[0] for device in [*devices, *before]})
        freed: dict[str, int] = {}
        survivors: list[Block] = []
        for block in blocks.values():
            if emptying.is_gone(block):
                freed[block.device] = freed.get(block.device, 0) + block.bytes
            else:
                survivors.append(block)
        until = time.monotonic() + search
        return Release(
            released=names,
            freed=dict(sorted(freed.items(), key=lambda item: accelerators_first(item[0]))),
            kept=kept,
            survivors=_survivors(survivors, verify, until),
            bystanders=_bystanders({device for device in devices if device != "cpu"}, set(blocks), until)
            if verify
            else (),
            allocated={device: (count, accelerators.allocated(device)) for device, count in before.items()},
            already=already,
            constants=constants,
        )

    def _change(self) -> dict[str, int]:
        """Wait for other threads, then change all that is to be changed; the bytes allocated before, by device.

        Raises:
            InUseError: nothing has been changed then.
        """
        from .census import Census
        from .threads import Gates

        inside = self._inside()
        gates = None
        try:
            if inside.threads():
                gates = Gates([part.value for part in self.plan.models], inside)
                gates.wait_until_empty(inside, self._until)
                self._look()  # it has moved: an offloaded weight is another tensor now
                inside = self._inside()
            guards = self._guard()
            try:
                # Who went in since the last look has a little time to come out: the next module raises `ReleasedError`.
                if (gates or Gates([], inside)).wait_until_empty(
                    inside, max(self._until, time.monotonic() + 1.0)
                ):
                    self.census = Census()
            except BaseException:
                guards.undo()
                raise
            return self._empty()
        finally:
            if gates:
                gates.open()

    def _inside(self) -> Inside:
        from .threads import Inside
        from .trees import with_ancestors

        def owners() -> set[int]:
            modules = [module for part in self.plan.models for module in part.modules]
            found = with_ancestors(modules, self.census.modules)
            return found | {id(pipeline) for pipeline in self.plan.pipelines}

        return Inside(owners, set(self.blocks))

    @no_collection()
    def _guard(self) -> Any:
        from .guard import Guards

        guards = Guards()
        for part in self.plan.models:
            guards.guard_module(part.value, part.modules, message_for(part.label))
        for pipeline in self.plan.pipelines:
            if not released_message(pipeline):
                guards.guard_pipeline(pipeline, message_for(type(pipeline).__name__))
        return guards

    @no_collection()
    def _empty(self) -> dict[str, int]:
        """Take the hooks off, and free; the bytes allocated before, by device.

        No step raises, so that none is left out.
        """
        from ..placement.tensors import held_tensors
        from . import accelerators, emptying
        from .census import Census
        from .failed_calls import clear_failed_calls
        from .hooks import forget_in_managers, strip, unlink

        plan = self.plan
        counted = accelerators.devices()
        accelerators.synchronize(counted)
        before = {device: accelerators.allocated(device) for device in counted}
        for part in plan.models:
            strip(part.modules)
        for part in plan.kept:
            unlink(part.value, self.released)
        forget_in_managers(self.census, self.released)
        to_cpu = emptying.blocks_of(
            held
            for part in plan.others
            for held in held_tensors(part.name, part.value)
            if held.tensor.device.type != "cpu"
        )
        modules = [module for part in (*plan.models, *plan.again) for module in part.modules]
        _drop_gradients(modules)
        left = emptying.empty(self.blocks, to_cpu, self.census, modules)
        clear_failed_calls(
            self.census.tracebacks, self.released | {id(pipeline) for pipeline in plan.pipelines}
        )
        if left:
            # What reads them may be garbage, as long as nobody holds it: one more try.
            del self.census
            gc.collect()
            for block in left.values():
                block.spared, block.outside = "", False
            self.census = Census()
            again = {key: block for key, block in left.items() if key in self.blocks}
            moved = {key: block for key, block in left.items() if key not in self.blocks}
            emptying.empty(again, moved, self.census, modules)
        return before


def _drop_gradients(modules: list[Any]) -> None:
    # A function, so that no variable refers to the last parameter while the references are counted.
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_leaf:
                parameter.grad = None


def _kept(part: Part) -> Kept:
    from ..placement.auditing import audit

    return Kept(part.label, type(part.value).__name__, part.users, audit(part.value).bytes)


def _survivors(blocks: list[Block], verify: bool, until: float) -> tuple[Survivor, ...]:
    if not blocks:
        return ()
    from .holders import holders_of_storages

    chains: list[Any] = [block.holders for block in blocks]
    unknown = [index for index, found in enumerate(chains) if not found] if verify else []
    if unknown:
        for index, found in zip(
            unknown, holders_of_storages([blocks[i] for i in unknown], until), strict=True
        ):
            chains[index] = found
    # A list first: a tuple that is being built can be met by the search, and must not be referred to.
    answers = [
        Survivor(
            block.path,
            block.device,
            block.bytes,
            block.spared or block.error or "its memory could not be freed",
            tuple(chains[index]),
        )
        for index, block in enumerate(blocks)
    ]
    return tuple(answers)


def _bystanders(devices: set[str], known: set[int], until: float) -> tuple[Bystander, ...]:
    """The largest tensors on ``devices`` that are neither a survivor nor part of a live module."""
    if not devices:
        return ()
    from ..placement.tensors import storage_of
    from .census import Census, device_tensors, weights_of
    from .holders import holders

    census = Census()
    known = known | weights_of(census.modules)
    largest: dict[int, tuple[int, Any]] = {}
    tensor: Any = None
    for tensor in device_tensors(census.tensors, devices):
        storage = storage_of(tensor)
        if storage is not None and storage.nbytes() and storage._cdata not in known:
            largest.setdefault(storage._cdata, (storage.nbytes(), tensor))
    del census  # the search for holders would meet it
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
