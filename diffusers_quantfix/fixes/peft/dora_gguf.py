"""A DoRA adapter for a GGUF layer fails.

Symptom: RuntimeError "The size of tensor a (36) must match the size of tensor b (64) at non-singleton dimension 1", or
    another pair of sizes, when a DoRA is loaded into a model from a GGUF file.
Cause: DoRA needs the norm of the weight. ``dequantize_module_weight`` does not know GGUF and returns the packed bytes,
    whose rows have a different length.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/integrations.py; not reported.
Patch: the function returns the dequantized weight, in the layer's compute dtype.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...engine.draft import Draft
from ...engine.errors import Undecided
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.target import finished
from ...weights.gguf import knows_gguf

FIX = Fix(
    __doc__,
    id="peft-dora-gguf",
    module="peft.utils.integrations",
    claims={"peft": ">=0.13.2,<=0.21.2", "diffusers": ">=0.32.0", "gguf": ""},
    # Anchored at the start: trying a match at every "gguf" of a long log takes quadratic time.
    patterns=(r"\A(?=.*gguf).*The size of tensor a .{0,20}must match the size of tensor b",),
    frames=(r"\bdora\b|use_dora", "GGUF", "peft/"),
    hot=True,
)


_WEIGHTS = "diffusers.quantizers.gguf.utils"


def broken(integrations: ModuleType) -> bool:
    """Pass a layer whose weight has GGUF's class name: is the weight returned as it is?

    Raises:
        Undecided: diffusers has not imported its GGUF weights yet; until then there are none.
    """
    import torch

    if not knows_gguf():
        return False
    if finished(_WEIGHTS) is None:
        raise Undecided(_WEIGHTS)

    class GGUFParameter(torch.nn.Parameter):
        pass

    layer = torch.nn.Module()
    layer.weight = GGUFParameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    try:
        return resolve(integrations, "dequantize_module_weight")(layer) is layer.weight
    except AttributeError:  # it reads an attribute that only a real one has
        return False


def patch(integrations: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize_module_weight(module):
            weight = module._parameters.get("weight")
            if type(weight).__name__ != "GGUFParameter" or _WEIGHTS not in sys.modules:
                return original(module)
            return sys.modules[_WEIGHTS].dequantize_gguf_tensor(weight).to(module.compute_dtype)

        return dequantize_module_weight

    draft.wrap_plain(integrations, "dequantize_module_weight", make)
