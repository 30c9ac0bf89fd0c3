"""What objects hold is read without keeping anything of theirs."""

from __future__ import annotations

import gc
import weakref

from diffusers_quantfix.engine.classes import slots_of


def test_slots_are_found_and_their_class_is_not_kept() -> None:
    """A notebook defines its classes again and again."""

    class Base:
        __slots__ = ("base", "unset")

    class Derived(Base):
        __slots__ = ("derived",)

    value = Derived()
    value.base, value.derived = 1, 2
    for _ in range(2):
        assert sorted(slots_of(value)) == [("base", 1), ("derived", 2)]
    left = [weakref.ref(Base), weakref.ref(Derived)]
    del Base, Derived, value
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_a_class_that_gets_other_bases() -> None:
    class Base:
        __slots__ = ("other", "place")

    class Left(Base):
        pass

    class Right(Base):
        pass

    class Derived(Left):
        pass

    value = Derived()
    value.place = 1
    assert slots_of(value) == [("place", 1)]
    Derived.__bases__ = (Left, Right)
    slots_of(value)
    assert slots_of(value) == [("place", 1)]


def test_a_property_that_takes_the_place_of_a_slot_is_not_run() -> None:
    class Kind:
        __slots__ = ("place",)

    value = Kind()
    value.place = 1
    assert slots_of(value) == [("place", 1)]
    Kind.place = property(lambda self: 1 / 0)
    for _ in range(2):
        assert slots_of(value) == []
