"""A compiled GGUF model fails, or its output is a GGUF weight.

Symptom: "KeyError: None" from the first run after ``torch.compile(model, backend="aot_eager")``, from
    ``GGUFParameter.__torch_function__``; or no error, and the output is a ``GGUFParameter``, and so is what is computed
    from it.  Every backend of AOTAutograd that runs its graph in Python is affected; inductor is not.
Cause: ``dequantize_gguf_tensor`` makes plain tensors with ``as_tensor``, which is no operation in a graph of
    AOTAutograd. The graph gets the ``GGUFParameter``, and ``__torch_function__`` makes every result that depends on it
    another one. For an operator whose first argument is a tuple, or a list with a plain tensor first, like ``cat``, it
    finds no quantization type and fails.
    From torch 2.12 on the graphs of diffusers before 0.37 run without ``__torch_function__``; before torch 2.8 these
    layers cannot be traced.
Upstream: https://github.com/huggingface/diffusers/issues/10795 (open) is about compiling these models.
Patch: the results of operators like ``torch.ops.aten.cat.default``, which only graphs call, stay plain tensors. Those
    of ``torch.cat`` and the like, which convert checkpoints, stay GGUF weights.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...engine.source import exchanged, own_function
from ...engine.versions import is_installed

FIX = Fix(
    __doc__,
    id="diffusers-gguf-compile",
    module="diffusers.quantizers.gguf.utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "torch": ">=2.8", "gguf": ""},
    patterns=("KeyError: None", r"KeyError: 'None While executing %\w{1,80} :"),
    frames=(
        "gguf/utils.py:__torch_function__",
        "torch/_ops.py:__call__",
        "torch/_functorch/",
        r"torch\.compile|aot_eager",
        "GGUF",
    ),
    since="0.1.0",
    hot=True,
)


def broken(utils: ModuleType) -> bool:
    """Does an operator of a graph return a GGUFParameter, and do graphs run with ``__torch_function__`` here?"""
    import torch

    if not is_installed("torch", ">=2.8" if _plain_at_once(utils) else ">=2.8,<2.12"):
        return False
    parameter_class = resolve(utils, "GGUFParameter")
    quant_type, (_, size) = next(iter(resolve(utils, "GGML_QUANT_SIZES").items()))
    parameter = parameter_class(torch.zeros(1, size, dtype=torch.uint8), quant_type=quant_type)
    return isinstance(torch.ops.aten.detach.default(parameter), parameter_class)


def patch(utils: ModuleType, draft: Draft) -> None:
    """Replace the code of ``__torch_function__``: a wrapper would add a call to every tensor operation."""
    function = own_function(utils, "GGUFParameter.__torch_function__")
    old = "result = super().__torch_function__(func, types, args, kwargs)"
    new = f"{old}\nif isinstance(func, torch._ops.OpOverload):\n    return result"
    draft.replace(function, "__code__", exchanged(function, old, new))


def _plain_at_once(utils: ModuleType) -> bool:
    """Whether a weight is dequantized as a plain tensor, from diffusers 0.37 on; earlier, the result is made one."""
    names = function_of(
        resolve(utils, "dequantize_gguf_tensor")
    ).__code__.co_names  # in order of their first use
    return "as_tensor" in names and names.index("as_tensor") < names.index("view")
