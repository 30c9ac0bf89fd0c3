"""Compares two code objects by what they do."""

from __future__ import annotations

import sys
from types import CodeType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["codes_inside", "is_copy", "is_same_code"]


def codes_inside(code: CodeType) -> list[CodeType]:
    """The code of the functions and classes that are defined in a piece of code."""
    return [constant for constant in code.co_consts if hasattr(constant, "co_code")]


def is_same_code(one: CodeType, running: CodeType) -> bool:
    """Whether a function does what the running one does, inner functions that come from another file aside.

    Not ``==``, which compares columns too: ``-X no_debug_ranges`` drops them.
    """
    return (
        _signature(one) == _signature(running)
        and one.co_names == running.co_names
        and len(one.co_consts) == len(running.co_consts)
        and all(map(_is_same_constant, one.co_consts, running.co_consts))
        and (_bytes(one) == _bytes(running) or _instructions(one) == _instructions(running))
    )


def is_copy(one: CodeType, code: CodeType) -> bool:
    """Whether a piece of code does what ``code`` does, inner functions included."""
    return is_same_code(one, code) and _files(one) == _files(code)


def _files(code: CodeType) -> list[str]:
    return [file for inner in codes_inside(code) for file in (inner.co_filename, *_files(inner))]


def _bytes(code: CodeType) -> tuple[bytes, ...]:
    return code.co_code, getattr(code, "co_exceptiontable", b"")


def _signature(code: CodeType) -> tuple[Any, ...]:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    is_nested = 0x10  # in another function
    return code.co_varnames, *counts, code.co_flags & ~is_nested


def _is_same_constant(one: Any, running: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(running, CodeType):
        return one.co_filename != running.co_filename or is_same_code(one, running)
    if isinstance(one, str):
        return bool(one == running)
    if isinstance(one, frozenset):  # a file of bytecode may hold it in another order
        return bool(one == running)
    return type(one) is type(running) and repr(one) == repr(running)


def _instructions(code: CodeType) -> list[tuple[int, ...]]:
    """The instructions of a function, without what depends on the module around it; of a jump, the number of the
    instruction that it leads to; and likewise the blocks in which errors are handled, which Python 3.11 keeps apart.

    A method of what the module imports is called by other instructions (Python 3.11 to 3.13), which are longer. Tools
    that count lines add instructions that do nothing.
    """
    import dis
    import opcode

    codes = opcode.opmap
    left_out = {codes.get(name) for name in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL")}
    method, attribute, glob = codes.get("LOAD_METHOD"), codes["LOAD_ATTR"], codes["LOAD_GLOBAL"]
    relative, absolute = set(opcode.hasjrel), set(opcode.hasjabs)
    # The lowest bit says what else is put on the stack.
    shifts = {glob: sys.version_info >= (3, 11), attribute: sys.version_info >= (3, 12)}
    text, extended = code.co_code, 0
    found: list[tuple[int, ...]] = []
    numbers, jumps = {}, []
    for at in range(0, len(text), 2):
        numbers[at] = len(found)
        number, argument = text[at], text[at + 1] | extended
        extended = argument << 8 if number == codes["EXTENDED_ARG"] else 0
        if number in left_out:
            continue
        if number in relative or number in absolute:
            jumps.append((at, len(found), argument))
        number = attribute if number == method else number
        found.append((number, argument >> shifts.get(number, 0)))
    for at, place, argument in jumps:
        number = text[at]
        after = at + 2 if number in relative else 0
        while after and after < len(text) and text[after] == codes.get("CACHE"):
            after += 2
        steps = -argument if "BACKWARD" in opcode.opname[number] else argument
        found[place] = number, numbers.get(after + 2 * steps, len(found))
    blocks: Any = getattr(dis, "_parse_exception_table", lambda code: ())(code)
    ends = [(block.start, block.end, block.target) for block in blocks]
    return found + [tuple(numbers.get(at, len(numbers)) for at in end) for end in ends]
