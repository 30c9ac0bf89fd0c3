"""peft adapters that take the shape of their delta from the layer's weight, which is wrong for a packed weight.

Upstream: peft/tuners/lokr/layer.py, peft/tuners/loha/layer.py.
"""

from __future__ import annotations

from ..engine.errors import TargetMissing
from ..engine.probe import function_of, resolve
from ..engine.source import expression, own_function, recompiled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["asks_for_shapes", "reads_shape_of_weight"]


def reads_shape_of_weight(layer_class: Any) -> bool:
    """Whether ``get_delta_weight`` reads ``weight.shape`` of the layer, not ``in_features`` and ``out_features``."""
    return "in_features" not in function_of(resolve(layer_class, "get_delta_weight")).__code__.co_names


def asks_for_shapes(layer: ModuleType, class_name: str, methods: tuple[str, ...], draft: Draft) -> None:
    """Replace the code of ``methods``: they read the features of a linear layer, not ``weight.shape``.

    Raises:
        TargetMissing: one of them does not read the shape of a weight in exactly one place.
        ForeignPatch: another tool has patched one of them.
    """
    import ast

    class Exchange(ast.NodeTransformer):
        found = 0

        def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
            value = node.value
            if node.attr != "shape" or not isinstance(value, ast.Attribute) or value.attr != "weight":
                return node
            self.found += 1
            base = ast.unparse(value.value)
            features = f"({base}.out_features, {base}.in_features)"
            return expression(f"{features} if hasattr({base}, 'in_features') else {base}.weight.shape", node)

    for name in methods:
        function, exchange = own_function(layer, f"{class_name}.{name}"), Exchange()
        code = recompiled(function, exchange)
        if exchange.found != 1:
            raise TargetMissing(f"{class_name}.{name} shapes its product in another way")
        draft.replace(function, "__code__", code)
