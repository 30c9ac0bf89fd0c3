"""``.to()`` of a pipeline with 8-bit components, for both kinds of diffusers pipelines.

Upstream warns about each 8-bit component that it cannot be moved, and does not move it. Here upstream moves everything
else, with its other warnings (such as float16 on a CPU), and the 8-bit components that can move are moved afterwards.
The warning about these is removed from upstream's code; if that cannot be recompiled (another tool's function, a
library without sources), the warning stays.

Upstream: diffusers/pipelines/pipeline_utils.py, diffusers/modular_pipelines/modular_pipeline.py.
"""

from __future__ import annotations

from ..engine.errors import ForeignPatch, TargetMissing
from ..engine.interruptions import heed_interruption
from ..engine.probe import resolve, texts_of
from ..engine.source import expression, own_function, recompiled
from . import eight_bit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["REFUSAL", "movable", "moves_all", "stays"]

REFUSAL = "8bit and moving it to"  # part of the warning that is no longer true
_MOVES = f"__import__({__name__!r}, fromlist=['movable']).movable([module])"


def stays(pipeline_utils: ModuleType) -> bool:
    """Whether upstream's ``DiffusionPipeline.to`` leaves 8-bit components where they are, in the installed releases."""
    said = texts_of(resolve(pipeline_utils, "DiffusionPipeline.to"))
    if "0.48.0" not in said or not pipeline_utils.is_bitsandbytes_version(">=", "0.48.0"):
        return True
    return "4.58.0" in said and not pipeline_utils.is_transformers_version(">", "4.58.0")


def moves_all(module: ModuleType, name: str, draft: Draft) -> None:
    """Patch ``to`` of the pipeline class ``name`` to move the 8-bit components too."""
    try:
        function, code = _without_refusal(module, f"{name}.to")
    except (ForeignPatch, TargetMissing, OSError) as error:
        heed_interruption(error)
    else:
        draft.replace(function, "__code__", code)
    draft.wrap_plain(getattr(module, name), "to", _moving)


def movable(components: Iterable[Any]) -> list[Any]:
    """The components (any objects) that are 8-bit models and can move."""
    return [part for part in components if eight_bit.is_8bit(part) and eight_bit.can_move(part)]


def _moving(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = eight_bit.asked_device(args, kwargs)
        models = [] if device is None else movable(self.components.values())
        result = original(self, *args, **kwargs)
        for model in models:
            eight_bit.move(model, device)
        return result

    return to


def _without_refusal(module: ModuleType, path: str) -> tuple[Any, Any]:
    """The function at ``path``, and its code with the warning only for components that cannot move.

    Raises:
        ForeignPatch, TargetMissing, OSError: as `own_function` and `recompiled`.
        TargetMissing: it does not warn in exactly one place.
    """
    import ast

    class Exchange(ast.NodeTransformer):
        found = 0

        def visit_Expr(self, node: ast.Expr) -> Any:
            written = ast.unparse(node)
            if REFUSAL not in written or "{module." not in written:
                return node
            self.found += 1
            test = expression(f"not {_MOVES}", node.value)
            return ast.copy_location(ast.If(test, [node], []), node)

    function, exchange = own_function(module, path), Exchange()
    code = recompiled(function, exchange)
    if exchange.found != 1:
        raise TargetMissing(f"{function.__qualname__} does not warn about 8-bit modules in one place")
    return function, code
