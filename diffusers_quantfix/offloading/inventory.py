"""The tensors of a group: found by one search, which later moves only compare with the group.

A LoRA, a replaced layer, its first forward pass or ``load_state_dict`` may replace modules, weights, companions or
inner tensors between two moves. `Inventory.look` compares everything that the search reads: the modules and their
contents, the attributes of weights and companions, and the address of each tensor, in a few calls that loop in C. If
anything differs, the group is searched again.

The references to an offloaded group are weak, so that replaced objects are freed.
"""

from __future__ import annotations

import sys
import weakref
from itertools import chain, compress
from operator import is_, itemgetter

from ..engine.interruptions import heed_interruption
from ..weights.companions import carries, holders
from ..weights.wrappers import backend_of, shell, with_inner
from .counters import versions
from .group_tensors import (
    ByMemory,
    address_of,
    contents,
    is_on_disk,
    layouts,
    owners,
    places,
    refuse_wrappers,
    unpack,
    wrappers,
)
from .own_objects import newcomers, own_buffers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

__all__ = [
    "INVENTORY",
    "Inventory",
    "Look",
    "has_inventory",
    "inventory_of",
    "is_onloaded",
    "onloaded_tensors",
]

# Where an 8-bit layer keeps the outliers of its last input.
_OF_THE_LAST_INPUT = ("subB", "idx")
INVENTORY = "_quantfix_inventory"
_contents = itemgetter("_modules", "_parameters", "_buffers")
_values = dict.values
_flat = chain.from_iterable


class Look:
    """The state of a group during one move. It has strong references to the tensors and must not outlive the move.

    Attributes:
        modules: those of the group, and the owners of its loose parameters.
        tensors: the group's tensors by slot; aliases share a slot.
        helds: the ``__dict__`` of each weight and companion holder that is compared.
        parameters: the parameters and buffers that are moved by assigning ``.data``.
        wrappers: the wrappers around some of the tensors, inner ones first.
    """

    __slots__ = ("helds", "modules", "parameters", "tensors", "wrappers")

    def __init__(
        self,
        modules: list[Any],
        tensors: list[Any],
        helds: list[Any],
        parameters: Sequence[Any],
        around: Sequence[Any],
    ) -> None:
        self.modules = modules
        self.tensors = tensors
        self.helds = helds
        self.parameters = parameters
        self.wrappers = around


class Inventory:
    """The tensors of a group by slot (their number), the places of each, and what is known about them.

    Attributes:
        plain: slot -> indices in ``Look.parameters`` of its parameters and buffers that are not quantized weights.
        onloaded: the tensors on the device, by slot; empty while the group is offloaded.
        hosts: the host copy of each slot; None for tensors that did not come from the offload device.
        versions: id of a plain parameter -> its `version_of` when it was onloaded.
        expected: the versions of `quantized`, if none of it was changed since the group was onloaded.
        pinned: whether each tensor is pinned; None if not checked yet.
        on_stream: the context manager of the group's stream; None if not created yet.
    """

    def __init__(self) -> None:
        self.plain: dict[int, list[int]] = {}
        self.onloaded: list[Any] = []
        self.hosts: list[Any] = []
        self.versions: dict[int, int | None] = {}
        self.pinned: list[bool | None] = []
        self.on_stream: Any = None
        self.expected: list[int | None] = []
        self._refs: list[Callable[[], Any]] = []
        self._lasting: list[int] = []  # the ids of the first of `quantized`
        self._is_filled = False
        self._left: set[int] = set()  # the ids of buffers that came in and are not moved yet
        self._address_of: Callable[[Any], int] = sys.modules["torch"].Tensor.data_ptr
        # Empty wrappers per device (`shell`): building one takes longer than moving small inner tensors.
        self._shells: dict[Any, tuple[list[Any], list[Any]]] = {}
        self._slots: dict[tuple[int, str], int] = {}  # (number of the examined holder, attribute) -> slot

    def __reduce__(self) -> tuple[type[Inventory], tuple[()]]:
        """A copy belongs to another group and starts empty."""
        return Inventory, ()

    def search(self, group: Any, earlier: Inventory | None, dropping: bool) -> Look:
        """Fill this inventory, and take over the host copies of ``earlier``.

        Args:
            group: the ``ModuleGroup``.
            earlier: the group's inventory until now.
            dropping: whether to free the outliers that 8-bit layers keep of their last input.
        """
        modules, tensors = contents(group)
        # What came into the place of a buffer since, in a pass or on its device, may be others' too.
        came = [] if earlier is None else newcomers(modules, earlier._known_buffers(group, modules))
        if came and group.stream is None:
            own_buffers(came)
            tensors = contents(group)[1]
        elif came and earlier is not None:
            # Upstream leaves it on the device, and the pass may still read it there. What stays comes with the group.
            self._left = {id(buffer) for _, _, buffer in came} - earlier._left
            tensors = [tensor for tensor in tensors if id(tensor) not in self._left]
        around = wrappers(group, tensors)
        if is_on_disk(group):
            refuse_wrappers(around)
        unpack(group, around)
        walked = [*modules, *owners(group)]
        content = [
            *group.modules,
            *group.parameters,
            *group.buffers,
            *_flat(map(_values, _flat(map(_contents, map(vars, walked))))),
        ]
        self._note_modules(walked, content)
        around = [one for wrapper in around for one in with_inner(wrapper)]
        everyone = {id(wrapper): wrapper for wrapper in around}
        for layer in walked:
            everyone.update((id(holder), holder) for _, holder, _ in holders(layer))
        number = {one: index for index, one in enumerate(everyone)}
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            found, parameters = self._find(places(group, modules, tensors), number, dropping)
            helds = list(map(vars, everyone.values()))
            self._note_attributes(helds, number, len(found))
            self.pinned = [None] * len(found)
            self.hosts = [None] * len(found)
            if earlier is not None and earlier.onloaded:
                known = ByMemory()
                for tensor, host in zip(earlier.onloaded, earlier.hosts, strict=True):
                    if host is not None:
                        known.put(tensor, host)
                self.hosts = list(map(known.get, found))
                self.onloaded, self.versions = found, earlier.versions
            if not all(map(address_of, found)):
                self._address_of = address_of
            self._remember(found)
        carriers = _attributes(self._carrying_of(walked))
        self._types = list(map(type, carriers))
        positions = [at for at, kind in enumerate(self._types) if carries(kind)]
        self._carriers_of = _picker(positions)
        carriers = [carriers[at] for at in positions]
        referred = self._refer(content, [*parameters, *everyone.values(), *carriers])
        self._parameters_of = _picker(referred[: len(parameters)])
        self._examined_of = _picker(referred[len(parameters) : len(parameters) + len(everyone)])
        self._carriers = referred[len(parameters) + len(everyone) :]
        self._known_carriers_of = _picker(self._carriers)
        self._around, self._is_filled = len(around), True
        look = Look(walked, found, helds, parameters, around)
        self._note_writes(group, look, earlier)
        return look

    def _note_writes(self, group: Any, look: Look, earlier: Inventory | None) -> None:
        """Note where quantized weights are written to, and the versions there, or those that ``earlier`` has."""
        plain = {id(look.parameters[at]): at for at in _flat(self.plain.values())}
        self._buffers = [
            (self._of_parameters[plain[id(buffer)]], number, plain[id(buffer)])
            for number, module in enumerate(look.modules)
            for buffer in module._buffers.values()
            if id(buffer) in plain
        ]
        beside = plain.keys() - {id(look.parameters[at]) for _, _, at in self._buffers}
        self._loose = [
            (self._of_parameters[plain[id(buffer)]], plain[id(buffer)])
            for buffer in group.buffers
            if id(buffer) in beside
        ]
        self._leader = weakref.ref(group.offload_leader)
        packed = [at for at, parameter in enumerate(look.parameters) if id(parameter) not in plain]
        # A write to a wrapper is counted there only.
        inner = [(at, slot) for (at, _), slot in self._slots.items() if at < len(look.wrappers)]
        self._packed_of, self._inner_of = _picker(packed), _picker(self._in_attributes)
        self._wrappers_of = _picker([at for at, _ in inner])
        lasting = [*(self._of_parameters[at] for at in packed), *(slot for _, slot in inner)]
        self._quantized_slots = [*lasting, *self._in_attributes]
        found = self.quantized(look)
        self._lasting = list(map(id, found[: len(lasting)]))
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            self.expect(versions(found))
        known = {} if earlier is None else dict(zip(earlier._lasting, earlier.expected, strict=False))
        self.expected[: len(lasting)] = map(known.get, self._lasting, self.expected)

    def _find(
        self, standing: list[tuple[Any, str, bool]], number: dict[int, int], dropping: bool
    ) -> tuple[list[Any], list[Any]]:
        """Number the tensors of `places`, aliases once.

        Args:
            standing: the result of `places`.
            number: id -> number of each examined holder.

        Returns:
            The tensors by slot, and the parameters and buffers that are moved by assigning ``.data``.
        """
        found: list[Any] = []
        numbers = ByMemory()
        parameters: list[Any] = []
        slots = self._slots
        self._of_parameters: list[int] = []
        tensor_type = sys.modules["torch"].Tensor
        for holder, attribute, quantized in standing:
            if dropping and attribute in _OF_THE_LAST_INPUT:
                setattr(holder, attribute, None)
                continue
            tensor = getattr(holder, attribute)
            slot = numbers.get(tensor)
            if slot is None:
                slot = len(found)
                found.append(tensor)
                numbers.put(tensor, slot)
            if attribute == "data" and isinstance(holder, tensor_type):
                if not quantized:
                    self.plain.setdefault(slot, []).append(len(parameters))
                self._of_parameters.append(slot)
                parameters.append(holder)
            else:
                slots[number[id(holder)], attribute] = slot
                found[slot] = tensor  # the lasting object; ``.data`` returns a new one each time
        in_attributes = set(slots.values())
        self._layouts = _layouts(parameters)
        # The slots that only a parameter's ``.data`` has, and that parameter's index.
        self._only = [(slot, at) for at, slot in enumerate(self._of_parameters) if slot not in in_attributes]
        self._in_attributes = sorted(in_attributes)
        # Without them the addresses of the tensors are those of the parameters.
        self._has_aliases = len({slot for slot, _ in self._only}) < len(parameters)
        return found, parameters

    def _note_modules(self, modules: list[Any], content: list[Any]) -> None:
        """Note the modules and their contents.

        Tensors are not compared by identity: ``swap_tensors`` refuses a parameter that has a weak reference. A tensor
        of the same type and layout, at the same address and with the same attributes, is moved in the same way.
        """
        number = {id(module): index for index, module in enumerate(modules)}
        self._modules = list(map(weakref.ref, modules))
        self._types_of_content = list(map(type, content))
        self._are_modules = [id(each) in number for each in content]
        self._children_of = _picker([number[id(each)] for each in content if id(each) in number])
        first: dict[int, int] = {}
        self._tied = [
            (first[id(each)], at)
            for at, each in enumerate(content)
            if first.setdefault(id(each), at) != at and each is not None
        ]
        # A module gets its first companions together with another weight.
        self._carrying = [
            at
            for at, module in enumerate(modules)
            if any(map(carries, map(type, vars(module).values())))
            or any(backend_of(tensor) == "bitsandbytes" for tensor in module._parameters.values())
        ]
        self._carrying_of = _picker(self._carrying)

    def _refer(self, content: list[Any], objects: Iterable[Any]) -> list[int]:
        """The index of each of ``objects`` in ``content``, or behind its end among the weak references."""
        at = {id(each): index for index, each in enumerate(content)}
        found = []
        for each in objects:
            if id(each) not in at:
                at[id(each)] = len(content) + len(self._refs)
                self._refs.append(weakref.ref(each))
            found.append(at[id(each)])
        return found

    def _note_attributes(self, helds: list[Any], number: dict[int, int], count: int) -> None:
        """Note the attribute values of weights and companions; of values that are not tracked, only the types."""
        slots = self._slots
        self._attributes = [(at, name, slot) for (at, name), slot in slots.items()]
        self._others: list[type] = []
        others: list[int] = []
        knowns: list[int] = []
        standing: list[int] = []  # the slot of a tensor, or ``count`` plus the number of an examined holder
        every = [(at, name, value) for at, held in enumerate(helds) for name, value in held.items()]
        for index, (at, name, value) in enumerate(every):
            known = slots.get((at, name))
            if known is None and (other := number.get(id(value))) is not None:
                known = count + other
            if known is None:
                others.append(index)
                self._others.append(type(value))
            else:
                knowns.append(index)
                standing.append(known)
        self._number_of_attributes = len(every)
        self._others_of, self._knowns_of, self._known_of = map(_picker, (others, knowns, standing))
        self._with_outliers = [at for at, held in enumerate(helds) if _OF_THE_LAST_INPUT[0] in held]

    def _remember(self, tensors: list[Any]) -> None:
        """Note that the group has ``tensors`` now."""
        self._now: list[Callable[[], Any]] = [_nothing] * len(tensors)
        for slot in self._in_attributes:
            self._now[slot] = weakref.ref(tensors[slot])
        addresses = self._addresses = list(map(self._address_of, tensors))
        if self._has_aliases:
            self._parameter_addresses = [addresses[at] for at in self._of_parameters]

    def _known_buffers(self, group: Any, modules: Iterable[Any]) -> list[Any]:
        """The buffers that this inventory has onloaded; while the group is offloaded, those on the host."""
        if self.onloaded:
            return [self.onloaded[slot] for slot, _, _ in self._buffers]
        device = sys.modules["torch"].device(group.offload_device).type
        buffers = (buffer for module in modules for buffer in module._buffers.values())
        return [buffer for buffer in buffers if buffer is not None and buffer.device.type == device]

    def look(self, group: Any, dropping: bool) -> Look | None:
        """The group's present state, or None if it must be searched. Call it with tensor subclasses disabled."""
        if not self._is_filled or (self._left and not self.onloaded):
            return None
        try:
            return self._look(group, dropping)
        except TypeError:  # an object was freed, and its weak reference returns None
            return None
        except RuntimeError as error:  # a sparse tensor has come in, which has no address
            heed_interruption(error)
            return None

    def _look(self, group: Any, dropping: bool) -> Look | None:
        modules = [ref() for ref in self._modules]
        content = [
            *group.modules,
            *group.parameters,
            *group.buffers,
            *_flat(map(_values, _flat(map(_contents, map(vars, modules))))),
        ]
        if list(map(type, content)) != self._types_of_content:
            return None
        if not all(map(is_, compress(content, self._are_modules), self._children_of(modules))):
            return None
        for one, other in self._tied:
            if content[one] is not content[other]:
                return None
        live = content + [ref() for ref in self._refs] if self._refs else content
        if self._carrying and not self._has_its_carriers(modules, live):
            return None

        tensors = [ref() for ref in self._now]
        examined = self._examined_of(live)
        helds: list[Any] = []
        if examined:
            helds = list(map(vars, examined))
            if not self._has_its_attributes(examined, helds, tensors, dropping):
                return None

        parameters = self._parameters_of(live)
        for slot, at in self._only:
            tensors[slot] = parameters[at].data
        if list(map(self._address_of, tensors)) != self._addresses:
            return None
        if parameters:
            if self._has_aliases and list(map(self._address_of, parameters)) != self._parameter_addresses:
                return None
            if _layouts(parameters) != self._layouts:
                return None
        return Look(modules, tensors, helds, parameters, examined[: self._around] if self._around else ())

    def _has_its_attributes(
        self, examined: Sequence[Any], helds: list[Any], tensors: list[Any], dropping: bool
    ) -> bool:
        if dropping:
            for at in self._with_outliers:
                for name in _OF_THE_LAST_INPUT:
                    if helds[at].get(name) is not None:
                        helds[at][name] = None
        attributes: list[Any] = list(_flat(map(_values, helds)))
        if len(attributes) != self._number_of_attributes:
            return False
        if list(map(type, self._others_of(attributes))) != self._others:
            return False
        return all(map(is_, self._knowns_of(attributes), self._known_of([*tensors, *examined])))

    def _has_its_carriers(self, modules: list[Any], live: list[Any]) -> bool:
        attributes = _attributes(self._carrying_of(modules))
        types = list(map(type, attributes))
        if types != self._types:
            positions = [at for at, kind in enumerate(types) if carries(kind)]
            if len(positions) != len(self._carriers):
                return False
            self._types, self._carriers_of = types, _picker(positions)
        return all(map(is_, self._carriers_of(attributes), self._known_carriers_of(live)))

    def exchange(self, look: Look, tensors: list[Any], device: Any) -> None:
        """Put ``tensors``, by slot and all on ``device``, into all places of the group."""
        helds, parameters, before = look.helds, look.parameters, look.tensors
        for at, name, slot in self._attributes:
            helds[at][name] = tensors[slot]
        for parameter, slot in zip(parameters, self._of_parameters, strict=True):
            if tensors[slot] is not before[slot]:
                parameter.data = tensors[slot]
        if look.wrappers:
            self._put_wrappers_on(device, look.wrappers)
        self._remember(tensors)

    def quantized(self, look: Look) -> list[Any]:
        """The quantized parameters and the wrappers; and the inner tensors and companions."""
        if not self._quantized_slots:
            return []
        return [
            *self._packed_of(look.parameters),
            *self._wrappers_of(look.wrappers),
            *self._inner_of(look.tensors),
        ]

    def buffers(self, look: Look) -> list[tuple[int, Any, Any]]:
        """The slot, module and tensor of each buffer that is not a quantized weight."""
        if not self._buffers and not self._loose:
            return []
        return [
            *((slot, look.modules[number], look.parameters[at]) for slot, number, at in self._buffers),
            # Of a model, beside its layers.
            *((slot, self._leader(), look.parameters[at]) for slot, at in self._loose),
        ]

    def rewritten(self, now: list[int | None]) -> set[int]:
        """The slots of those of `quantized` whose version ``now`` is not the expected one."""
        return {
            slot
            for slot, one, other in zip(self._quantized_slots, self.expected, now, strict=True)
            if one is not None and other is not None and one != other
        }

    def expect(self, now: list[int | None]) -> None:
        """Expect the versions ``now`` from here on; an inner tensor will be a new one."""
        count = len(self._lasting)
        self.expected = now[:count] + [version and 0 for version in now[count:]]

    def _put_wrappers_on(self, device: Any, around: Sequence[Any]) -> None:
        now = _layouts(around)
        known = self._shells.get(device)
        if known is None or known[0] != now:
            known = self._shells[device] = now, [shell(wrapper, device) for wrapper in around]
        for wrapper, empty in zip(around, known[1], strict=True):
            if wrapper.device != device:
                wrapper.data = empty


def inventory_of(group: Any, dropping: bool) -> tuple[Inventory, Look]:
    """The inventory of ``group``, searched again if needed, and its present state; see `Inventory.search`."""
    known: Inventory | None = vars(group).get(INVENTORY)
    if known is not None and not is_on_disk(group):
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            look = known.look(group, dropping)
        if look is not None:
            return known, look
    inventory = Inventory()
    look = inventory.search(group, known, dropping)
    setattr(group, INVENTORY, inventory)
    return inventory, look


def has_inventory(group: Any) -> bool:
    """Whether ``group`` is moved by this package."""
    return INVENTORY in vars(group)


def onloaded_tensors(group: Any) -> list[Any]:
    """The tensors of ``group`` on its device, if this package onloaded it and it was not offloaded since."""
    known: Inventory | None = vars(group).get(INVENTORY)
    return [] if known is None else known.onloaded


def is_onloaded(group: Any) -> bool:
    """Whether this package onloaded ``group`` and it was not offloaded since."""
    return bool(onloaded_tensors(group))


def _picker(positions: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the items at ``positions``; `itemgetter` needs two positions to return a tuple."""
    if not positions:
        return _pick_none
    if len(positions) == 1:
        at = positions[0]
        return lambda each: (each[at],)
    return itemgetter(*positions)


def _pick_none(each: Sequence[Any]) -> Sequence[Any]:
    return ()


def _attributes(modules: Iterable[Any]) -> list[Any]:
    helds: list[Any] = list(map(vars, modules))
    return list(_flat(map(_values, helds)))


def _nothing() -> None:
    """A placeholder for a weak reference."""


def _layouts(tensors: Sequence[Any]) -> list[Any]:
    try:
        return layouts(tensors)
    except RuntimeError:  # a sparse one has no strides
        return [_layout(tensor) for tensor in tensors]


def _layout(tensor: Any) -> Any:
    try:
        return layouts([tensor])
    except RuntimeError:
        return tensor.dtype, tensor.layout
