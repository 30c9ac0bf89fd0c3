"""Adapters of peft whose product gets the shape of a layer's weight, which is another one when the weight is packed.

Upstream: peft/tuners/lokr/layer.py, peft/tuners/loha/layer.py.
"""

from __future__ import annotations

from ..engine.errors import TargetMissing
from ..engine.probe import function_of, resolve
from ..engine.source import expression, recompiled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..engine.draft import Draft

__all__ = ["asks_for_shapes", "reads_shape_of_weight"]


def reads_shape_of_weight(layer_class: Any) -> bool:
    """Whether ``get_delta_weight`` looks at ``weight.shape`` of the layer, not at its numbers of features."""
    return "in_features" not in function_of(resolve(layer_class, "get_delta_weight")).__code__.co_names


def asks_for_shapes(layer_class: Any, methods: tuple[str, ...], draft: Draft) -> None:
    """Compile ``methods`` anew, which ask a linear layer for its numbers of features instead of ``weight.shape``.

    Raises:
        TargetMissing: one of them does not look at the shape of a weight in just one place.
    """
    import ast

    class Exchange(ast.NodeTransformer):
        found = 0

        def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
            value = node.value
            if node.attr != "shape" or not isinstance(value, ast.Attribute) or value.attr != "weight":
                return node
            self.found += 1
            layer = ast.unparse(value.value)
            features = f"({layer}.out_features, {layer}.in_features)"
            return expression(
                f"{features} if hasattr({layer}, 'in_features') else {layer}.weight.shape", node
            )

    for name in methods:
        function, exchange = function_of(resolve(layer_class, name)), Exchange()
        code = recompiled(function, exchange)
        if exchange.found != 1:
            raise TargetMissing(f"{layer_class.__name__}.{name} shapes its product in another way")
        draft.replace(function, "__code__", code)
