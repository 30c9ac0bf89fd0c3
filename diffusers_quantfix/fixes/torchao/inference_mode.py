"""In inference mode torchao models cannot be moved or offloaded, or stay on the GPU.

Symptom: in ``torch.inference_mode()``, RuntimeError "Attempted to set the storage of a tensor on device "cuda:0" to a
    storage on different device "cpu"" from ``model.to()`` and model offload, "_apply(): Couldn't swap Linear.weight"
    and "Cannot set version_counter for inference tensor" if the model is there already, and NotImplementedError
    "Int8Tensor dispatch: attempting to run unimplemented operator/function" from sequential offload and
    ``model.to(dtype)``. With torch 2.15 a move raises nothing, but the weights report the device that they were on:
    model offload leaves them on the GPU, and a later run on the CPU fails with "Expected all tensors to be on the same
    device".
Cause: in this mode, and for what was made in it, torch passes operators on that it otherwise decomposes. Most are
    unknown there; the one for a move gives its result the storage, and with it the device, of the old tensor, as for a
    view. And what torchao makes in this mode cannot be a view of a weight that was made outside.
Upstream: https://github.com/pytorch/ao/blob/v0.18.0/torchao/utils.py#L504; not reported there, only
    to a program that uses it: https://github.com/9nate-drake/Comfyui-SecNodes/issues/13
Patch: a tensor that was moved keeps its own storage, a view is made as outside of the mode, and unknown operators are
    decomposed as there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="torchao-inference-mode",
    module="torchao.utils",
    claims={"torchao": ">=0.15.0,<=0.18.0"},
    patterns=(
        r"torchao.{0,4000}Attempted to set the storage of a tensor on device",
        r"torchao.{0,4000}Cannot set version_counter for inference tensor",
        r"Tensor dispatch: attempting to run unimplemented operator/function: "
        r"func=<OpOverload\(op='aten\.(to|_has_compatible_shallow_copy_type)'",
    ),
    frames=("torchao/utils.py:_dispatch__torch_dispatch__",),
    hot=True,
    since="0.1.0",
)

_GIVEN = (
    "__torch_dispatch__", "__torch_function__", "implements", "implements_torch_function",
    "_implements_common_tensor_ops",
)  # fmt: skip
_ALIASING = "return_and_correct_aliasing"
# Reached only by an operator that torchao does not know.
_UNKNOWN = "arg_types = tuple(type(arg) for arg in args)"
_DECOMPOSED = f"""
if isinstance(func, torch._ops.OpOverload):
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
{_UNKNOWN}
"""


def broken(utils: ModuleType) -> bool:
    import torch

    weight = _class(resolve(utils, "TorchAOBaseTensor"), torch)(torch.empty(0))
    with torch.inference_mode():
        try:
            weight.to(weight.dtype).detach()
            return bool(weight.to("meta").device == weight.device)
        except NotImplementedError:
            return True
        except RuntimeError as error:
            return any(
                text in str(error) for text in ("Attempted to set the storage", "Cannot set version_counter")
            )


def _class(base: Any, torch: Any) -> Any:
    """A class with what ``base`` gives its subclasses.

    It is none of them: another fix goes through those.
    """

    class Weight(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, device=inner.device
            )

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> Any:
            return ["inner"], None

        def _apply_fn_to_data(self, change: Any) -> Any:
            return type(self)(change(self.inner))

    for name in _GIVEN:
        setattr(Weight, name, vars(base)[name])
    Weight._implements_common_tensor_ops()
    return Weight


def patch(utils: ModuleType, draft: Draft) -> None:
    """Wrap ``torchao.utils.return_and_correct_aliasing``, and replace the code of ``_dispatch__torch_dispatch__``."""
    import torch

    moved = torch.ops.aten.to.dtype_layout

    def make(original: Any) -> Any:
        def return_and_correct_aliasing(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
            if func is moved and out.device != args[0].device:
                return out
            if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
                with torch.inference_mode(False):
                    out = out._apply_fn_to_data(_same)
            return original(func, args, kwargs, out)

        return return_and_correct_aliasing

    draft.wrap_plain(utils, _ALIASING, make)
    dispatch = own_function(utils, "_dispatch__torch_dispatch__")
    draft.replace(dispatch, "__code__", exchanged(dispatch, _UNKNOWN, _DECOMPOSED))


def _same(inner: Any) -> Any:
    return inner
