"""Under autocast the biases of 8-bit layers are rounded for good.

Symptom: one forward pass under ``torch.autocast`` turns the float32 biases of 8-bit layers into float16 or bfloat16
    ones: later outputs, and a checkpoint, differ. A trained bias (LoRA with ``bias="all"``) loses small steps, or
    raises ValueError "Attempting to unscale FP16 gradients.".
Cause: ``Linear8bitLt.forward`` stores the bias in the dtype of its input, ``self.bias.data =
    self.bias.data.to(x.dtype)``.
Upstream: none.
Patch: the bias is converted for the pass only. Twins: ``bnb-linear4bit-input-bias``, ``bnb-linear4bit-bias``.
"""

from __future__ import annotations

import ast
from types import ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import expression, own_function, recompiled, statements
from ...models.stored_bias import STORED, stores_bias

FIX = Fix(
    __doc__,
    id="bnb-linear8bit-bias",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    harm="wrong result",
    hot=True,
)

_CONVERTED = """
bias = self.bias
if bias is not None and bias.dtype != x.dtype:
    bias = bias.to(x.dtype)
"""


def broken(modules: ModuleType) -> bool:
    """Run a layer with only a bias, and with no more of an input than its dtype: the multiplication looks at its
    device."""
    import torch

    return stores_bias(resolve(modules, "Linear8bitLt"), SimpleNamespace(dtype=torch.bfloat16))


def patch(modules: ModuleType, draft: Draft) -> None:
    """Replace the code of ``Linear8bitLt.forward``."""

    class Exchange(ast.NodeTransformer):
        found = 0

        def visit_If(self, node: ast.If) -> Any:
            self.generic_visit(node)
            if STORED not in map(ast.unparse, node.body):
                return node
            self.found += 1
            return statements(_CONVERTED, node)

        def visit_keyword(self, node: ast.keyword) -> Any:
            if node.arg == "bias" and ast.unparse(node.value) == "self.bias":
                self.found += 1
                node.value = expression("bias", node.value)
            return node

    function, exchange = own_function(modules, "Linear8bitLt.forward"), Exchange()
    code = recompiled(function, exchange)
    if exchange.found != 2:
        raise TargetMissing("Linear8bitLt.forward does not convert its bias in one place")
    draft.replace(function, "__code__", code)
