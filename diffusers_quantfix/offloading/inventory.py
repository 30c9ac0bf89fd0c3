"""What a group moves: searched for once, and at each later move only compared with what it was.

A LoRA, an upgrade of a layer, its first forward pass or ``load_state_dict`` may have exchanged modules, weights,
companions or inner tensors between two moves. `Inventory.look` compares all that the search reads: the modules and what
they hold, the attributes of weights and companions, and the address of each tensor, in a few calls that loop in C.
Where something differs, the group is searched again.

A group that waits on the offload device is only referred to weakly, so that what is exchanged is freed.
"""

from __future__ import annotations

import sys
import weakref
from itertools import chain, compress
from operator import is_, itemgetter

from ..weights.companions import carries, holders
from ..weights.wrappers import backend_of, shell, with_inner
from .group_tensors import ByMemory, contents, is_on_disk, owners, places, refuse_wrappers, unpack, wrappers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

__all__ = ["INVENTORY", "Inventory", "Look", "brought", "has_inventory", "inventory_of", "is_brought"]

# What an 8-bit layer keeps of the outliers of its last input.
_OF_THE_LAST_INPUT = ("subB", "idx")
INVENTORY = "_quantfix_inventory"
_contents = itemgetter("_modules", "_parameters", "_buffers")
_values = dict.values
_flat = chain.from_iterable


class Look:
    """A group as it is at one move. It holds its tensors, and must not outlive the move.

    Attributes:
        tensors: each memory of the group once.
        wrappers: what is around some of them, inner wrappers first.
        parameters: those that are moved by their ``.data``.
    """

    __slots__ = ("helds", "parameters", "tensors", "wrappers")

    def __init__(
        self, tensors: list[Any], helds: list[Any], parameters: Sequence[Any], around: Sequence[Any]
    ) -> None:
        self.tensors = tensors
        self.helds = helds
        self.parameters = parameters
        self.wrappers = around


class Inventory:
    """The tensors of a group by number, where each of them stands, and what is known of them.

    Attributes:
        plain: of some tensors the parameters and buffers that are no quantized weights, as indices of
            ``Look.parameters``.
        brought: the tensors that were onloaded, until they are offloaded.
        hosts: what each was before; None for those that did not come from the offload device.
        versions: how often such a parameter had been changed when it came, by its id.
        pinned: whether each tensor is pinned, None where nobody has asked.
        on_stream: the context manager of the group's stream, None where there is none yet.
    """

    def __init__(self) -> None:
        self.plain: dict[int, list[int]] = {}
        self.brought: list[Any] = []
        self.hosts: list[Any] = []
        self.versions: dict[int, int | None] = {}
        self.pinned: list[bool | None] = []
        self.on_stream: Any = None
        self._refs: list[Callable[[], Any]] = []
        self._is_filled = False
        self._address_of = sys.modules["torch"].Tensor.data_ptr
        # What a wrapper is on a device, without its inner tensors: to build it takes longer than to move small ones.
        self._shells: dict[Any, tuple[list[Any], list[Any]]] = {}
        self._slots: dict[tuple[int, str], int] = {}  # where tensors stand: what is examined, the attribute

    def __reduce__(self) -> tuple[type[Inventory], tuple[()]]:
        """A copy is of another group, and searches it."""
        return Inventory, ()

    def search(self, group: Any, earlier: Inventory | None, dropping: bool) -> Look:
        """Fill this inventory; what ``earlier`` knows of host copies stays known.

        Args:
            dropping: free what 8-bit layers keep of their last input.
        """
        modules, tensors = contents(group)
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
            if earlier is not None and earlier.brought:
                known = ByMemory()
                for tensor, host in zip(earlier.brought, earlier.hosts, strict=True):
                    if host is not None:
                        known.put(tensor, host)
                self.hosts = list(map(known.get, found))
                self.brought, self.versions = found, earlier.versions
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
        return Look(found, helds, parameters, around)

    def _find(
        self, standing: list[tuple[Any, str, bool]], number: dict[int, int], dropping: bool
    ) -> tuple[list[Any], list[Any]]:
        """Number the tensors of `places`, each memory once; returns them, and the parameters that have some.

        Args:
            number: of what is examined, by its id.
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
                found[slot] = tensor  # the object that stays; ``.data`` is another one each time
        in_attributes = set(slots.values())
        self._layouts = list(map(_layout, parameters))
        # The memory that no attribute has, and which parameter has it.
        self._only = [(slot, at) for at, slot in enumerate(self._of_parameters) if slot not in in_attributes]
        self._in_attributes = sorted(in_attributes)
        return found, parameters

    def _note_modules(self, modules: list[Any], content: list[Any]) -> None:
        """The modules, and what they hold.

        Tensors are not compared by what they are: no weak reference may be to a parameter, or ``swap_tensors`` refuses
        it. One of the same type and layout, at the same address and with the same attributes, is moved like it.
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
        """Where to find ``objects``: in ``content``, or after it by a weak reference."""
        at = {id(each): index for index, each in enumerate(content)}
        found = []
        for each in objects:
            if id(each) not in at:
                at[id(each)] = len(content) + len(self._refs)
                self._refs.append(weakref.ref(each))
            found.append(at[id(each)])
        return found

    def _note_attributes(self, helds: list[Any], number: dict[int, int], count: int) -> None:
        """What stands in the attributes of weights and companions, and the types of what is not compared."""
        slots = self._slots
        self._attributes = [(at, name, slot) for (at, name), slot in slots.items()]
        self._others: list[type] = []
        self._is_other: list[bool] = []
        self._is_known: list[bool] = []
        standing: list[int] = []  # the number of a tensor, or ``count`` and that of what is examined
        for at, held in enumerate(helds):
            for name, value in held.items():
                known = slots.get((at, name))
                if known is None and (other := number.get(id(value))) is not None:
                    known = count + other
                if known is None:
                    self._others.append(type(value))
                else:
                    standing.append(known)
                self._is_known.append(known is not None)
                self._is_other.append(known is None)
        self._known_of = _picker(standing)
        self._with_outliers = [at for at, held in enumerate(helds) if _OF_THE_LAST_INPUT[0] in held]

    def _remember(self, tensors: list[Any]) -> None:
        """``tensors`` stand in the places of the group now."""
        self._now: list[Callable[[], Any]] = [_nothing] * len(tensors)
        for slot in self._in_attributes:
            self._now[slot] = weakref.ref(tensors[slot])
        addresses = self._addresses = list(map(self._address_of, tensors))
        self._parameter_addresses = [addresses[at] for at in self._of_parameters]

    def look(self, group: Any, dropping: bool) -> Look | None:
        """The group as it is; None if it has to be searched. Within a block without tensor subclasses."""
        if not self._is_filled:
            return None
        try:
            return self._look(group, dropping)
        except TypeError:  # something is gone, and a reference to it None
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
        live = content + [ref() for ref in self._refs]
        if self._carrying and not self._has_its_carriers(modules, live):
            return None

        examined = self._examined_of(live)
        parameters = self._parameters_of(live)
        helds: list[Any] = list(map(vars, examined))
        if dropping:
            for at in self._with_outliers:
                for name in _OF_THE_LAST_INPUT:
                    if helds[at].get(name) is not None:
                        helds[at][name] = None
        attributes: list[Any] = list(_flat(map(_values, helds)))
        if len(attributes) != len(self._is_known):
            return None
        if list(map(type, compress(attributes, self._is_other))) != self._others:
            return None
        tensors = [ref() for ref in self._now]
        known = self._known_of([*tensors, *examined])
        if not all(map(is_, compress(attributes, self._is_known), known)):
            return None

        for slot, at in self._only:
            tensors[slot] = parameters[at].data
        if list(map(self._address_of, tensors)) != self._addresses:
            return None
        if parameters:
            if list(map(self._address_of, parameters)) != self._parameter_addresses:
                return None
            if list(map(_layout, parameters)) != self._layouts:
                return None
        return Look(tensors, helds, parameters, examined[: self._around] if self._around else ())

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
        """Let ``tensors``, by number, all of them on ``device``, stand in the places of the group."""
        helds, parameters, before = look.helds, look.parameters, look.tensors
        for at, name, slot in self._attributes:
            helds[at][name] = tensors[slot]
        for parameter, slot in zip(parameters, self._of_parameters, strict=True):
            if tensors[slot] is not before[slot]:
                parameter.data = tensors[slot]
        if look.wrappers:
            self._put_wrappers_on(device, look.wrappers)
        self._remember(tensors)

    def _put_wrappers_on(self, device: Any, around: Sequence[Any]) -> None:
        layouts = list(map(_layout, around))
        known = self._shells.get(device)
        if known is None or known[0] != layouts:
            known = self._shells[device] = layouts, [shell(wrapper, device) for wrapper in around]
        for wrapper, empty in zip(around, known[1], strict=True):
            if wrapper.device != device:
                wrapper.data = empty


def inventory_of(group: Any, dropping: bool) -> tuple[Inventory, Look]:
    """What is to be moved of ``group``, and how it is now; see `Inventory.search`."""
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


def brought(group: Any) -> list[Any]:
    """The tensors of ``group`` on its device, where it was onloaded by this package and not offloaded since."""
    known: Inventory | None = vars(group).get(INVENTORY)
    return [] if known is None else known.brought


def is_brought(group: Any) -> bool:
    """Whether ``group`` was onloaded and not offloaded since."""
    return bool(brought(group))


def _picker(positions: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns what stands at ``positions`` of a sequence: a group of one layer is many short ones."""
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
    """In the place of a weak reference."""


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
