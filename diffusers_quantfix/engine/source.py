"""A library's function, recompiled from its own source with one place changed.

For a bug in the middle of a function, which a wrapper cannot reach, and for forward passes, where a wrapper would add a
call to every run. The function stays upstream's, with its file name and line numbers, so tracebacks and debuggers show
upstream's lines.
"""

from __future__ import annotations

import sys
from types import CodeType

from .bytecode import codes_inside, is_same_code
from .errors import TargetMissing
from .foreign import refuse_foreign
from .probe import function_of, nested_code, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from types import FunctionType, ModuleType
    from typing import Any

__all__ = ["exchanged", "expression", "own_function", "recompiled", "statements"]


def own_function(module: ModuleType, path: str) -> FunctionType:
    """The library's own function at a dotted path below a module, without its wrappers, for `recompiled`.

    Raises:
        TargetMissing: a step of the path does not exist in this release.
        ForeignPatch: another tool has put its own function there.
    """
    parent, _, name = path.rpartition(".")
    owner = resolve(module, parent) if parent else module
    function = function_of(resolve(owner, name))
    refuse_foreign(owner, name, function)
    return function


def recompiled(function: FunctionType, exchange: ast.NodeTransformer) -> CodeType:
    """The code of ``function`` after the changes of ``exchange``, for `Draft.replace` of its ``__code__``.

    Args:
        function: not a closure; a method may use ``super()``.
        exchange: a visitor of the function's syntax tree. The caller must check that it found its place.

    Raises:
        TargetMissing: the function has free variables.
        OSError: its source is missing (installed as bytecode only), or is not that of the running code: the file has
            changed since it was imported, or an import hook has added to it.
    """
    import linecache

    old = function.__code__
    # Not inspect.getsource, which searches all modules for the function's own, and reads a block token by token.
    linecache.checkcache(old.co_filename)
    text = linecache.getlines(old.co_filename, function.__globals__)
    lines = text[old.co_firstlineno - 1 :]
    if not lines:
        raise OSError(f"the source of {function.__qualname__} is missing")
    tree = _definition(lines, old.co_firstlineno)
    within = _class_around(function)
    another = OSError(f"the source of {function.__qualname__} is not that of the running code")
    try:
        unchanged = _compiled(tree, within, old)
    except TargetMissing:
        raise another from None
    if unchanged.co_freevars != old.co_freevars:
        raise TargetMissing(f"{function.__qualname__} is a closure here")
    if not is_same_code(unchanged, old) and not _contains("".join(text), old):
        raise another
    new = _compiled(exchange.visit(tree), within, old)
    if sys.version_info >= (3, 11):
        new = new.replace(co_qualname=old.co_qualname)
    # An inner function that another fix has replaced comes from another file, and stays.
    others = {code.co_name: code for code in codes_inside(old) if code.co_filename != old.co_filename}
    if others:
        named = {code: others.get(code.co_name, code) for code in codes_inside(new)}
        new = new.replace(co_consts=tuple(named.get(const, const) for const in new.co_consts))
    return new


def _compiled(tree: Any, within: str, like: CodeType) -> CodeType:
    """The code of a function from its tree, compiled as another one is.

    Args:
        tree: is left as it is.
        within: the name of the class in which it is defined; empty for none.
        like: the code whose name, file and ``__future__`` features it has.

    Raises:
        TargetMissing: the tree does not define it.
    """
    import __future__

    import ast

    if within:
        # ``super()`` needs the variable ``__class__``, which exists only in a class; private names depend on its name.
        around: Any = ast.parse("class C: pass")
        around.body[0].name, around.body[0].body = within, tree.body
        tree = around
    features = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names} - {0})
    flags = like.co_flags & features

    def compiled() -> CodeType:
        code: CodeType = compile(tree, like.co_filename, "exec", flags=flags, dont_inherit=True)
        return code

    try:
        code = compiled()
    except TypeError:  # a node without a line number; to look for them takes as long as all the rest
        tree = ast.fix_missing_locations(tree)
        code = compiled()
    return nested_code(nested_code(code, within) if within else code, like.co_name)


def _contains(text: str, running: CodeType) -> bool:
    """Whether a file defines the running function: for calls with many arguments, whose instructions depend on the
    imports of the file."""
    try:
        codes = [compile(text, running.co_filename, "exec", dont_inherit=True)]
    except SyntaxError:  # somebody is writing it
        return False
    for code in codes:
        codes += codes_inside(code)
    return any(
        code.co_firstlineno == running.co_firstlineno and is_same_code(code, running) for code in codes
    )


def _definition(lines: list[str], number: int) -> Any:
    """The syntax tree of the definition that begins with the first of these lines, line ``number`` of its file.

    It ends before a line that is indented no deeper, if what is above that line is complete: decorators, brackets and
    strings also continue there.

    Raises:
        OSError: no end was found: these lines are not the source of the running code.
    """
    import ast

    def indentation(line: str) -> int:
        return len(line) - len(line.lstrip())

    # None of this is executed: the decorators only preserve the first line number, and the block the columns.
    block = "if 1:\n" if indentation(lines[0]) else "\n"
    before = "\n" * (number - 2) + block if number > 1 else ""
    for end in range(1, len(lines) + 1):
        following = lines[end] if end < len(lines) else "end"
        if indentation(following) > indentation(lines[0]) or following.lstrip()[:1] in ("", "#"):
            continue
        try:
            return ast.parse(before + "".join(lines[:end]))
        except SyntaxError:
            pass
    raise OSError(f"the source of line {number} does not end")


def _class_around(function: FunctionType) -> str:
    """The name of the class in whose body a function is defined; empty if there is none."""
    # functools.wraps may have given the function another one's name; before Python 3.11 there is no other source.
    path: str = getattr(function.__code__, "co_qualname", function.__qualname__)
    name = path.rpartition(".")[0].rpartition(".")[2]
    return "" if name == "<locals>" else name


def exchanged(function: FunctionType, old: str, new: str, *others: tuple[str, str]) -> CodeType:
    """The code of ``function`` with ``new`` in place of ``old``, one statement or expression.

    Args:
        function: see `recompiled`.
        old: what is replaced.
        new: what it is replaced with.
        others: more of them, as (old, new).

    Raises:
        TargetMissing: one of them does not occur, or more than once; and as `recompiled`.
        OSError: as `recompiled`.
    """
    import ast

    pairs = ((old, new), *others)
    wanted: list[Any] = [ast.parse(text).body[0] for text, _ in pairs]
    wanted = [node.value if isinstance(node, ast.Expr) else node for node in wanted]
    found: list[int] = []

    class Exchange(ast.NodeTransformer):
        def visit(self, node: Any) -> Any:
            self.generic_visit(node)
            for index, one in enumerate(wanted):
                if _is_same_tree(node, one):
                    found.append(index)
                    text = pairs[index][1]
                    return statements(text, node) if isinstance(node, ast.stmt) else expression(text, node)
            return node

    code = recompiled(function, Exchange())
    for index, (text, _) in enumerate(pairs):
        if found.count(index) != 1:
            raise TargetMissing(f"{function.__qualname__} does not have `{text}` in one place")
    return code


def _is_same_tree(one: Any, other: Any) -> bool:
    """Whether two syntax trees, or two fields of their nodes, say the same, wherever they stand."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same_tree, one, other))
    fields = getattr(one, "_fields", None)
    if fields is None:
        return bool(one == other)
    # ``ctx``, whether it is read or written, follows from what is around it.
    return all(
        _is_same_tree(getattr(one, name, None), getattr(other, name, None))
        for name in fields
        if name != "ctx"
    )


def statements(text: str, at: ast.stmt) -> list[ast.stmt]:
    """The statements of ``text``, with the line numbers of ``at``."""
    import ast

    placed: list[ast.stmt] = _placed(ast.parse(text), at).body
    return placed


def expression(text: str, at: ast.expr) -> ast.expr:
    """The expression ``text``, with the line numbers of ``at``."""
    import ast

    placed: ast.expr = _placed(ast.parse(text, mode="eval"), at).body
    return placed


def _placed(parsed: Any, at: ast.AST) -> Any:
    import ast

    for node in ast.walk(parsed):
        ast.copy_location(node, at)
    return parsed
