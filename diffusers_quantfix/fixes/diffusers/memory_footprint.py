"""A quanto or torchao model reports the memory of an unquantized one.

Symptom: ``get_memory_footprint()`` of a model with quanto or torchao weights is that without quantization.
    ``ComponentsManager.enable_auto_cpu_offload`` decides by it, and offloads too many models or too few.
Cause: the number of elements is multiplied by the size of one, and such a weight has the shape and dtype of the plain
    one.
Upstream: not reported; ``get_memory_footprint`` of diffusers and transformers.
Patch: for these weights it counts the tensors that they consist of. Others are counted as before: the scales of
    bitsandbytes are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...weights.wrappers import inner_places, is_wrapper

FIX = Fix(
    __doc__,
    id="diffusers-memory-footprint",
    targets=(
        Target(
            "diffusers-model-footprint",
            "diffusers.models.modeling_utils",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
        Target(
            "transformers-model-footprint",
            "transformers.modeling_utils",
            {"transformers": ">=4.44.2,<=5.24.0"},
        ),
    ),
    harm="memory or time",
    patterns=(
        r"get_memory_footprint.{0,200}(quanto|torchao)",
        r"(quanto|torchao).{0,200}get_memory_footprint",
    ),
    frames=("components_manager.py",),
)

_CLASSES = {"diffusers.models.modeling_utils": "ModelMixin", "transformers.modeling_utils": "PreTrainedModel"}
_NAME = "get_memory_footprint"


def broken(module: ModuleType) -> bool:
    """Ask for the size of a weight of four bytes that looks like torchao's, of four elements of two bytes each."""
    import torch

    class Weight:
        __module__ = "torchao.a_probe"

        def __init__(self) -> None:
            self.inner = torch.empty(4, dtype=torch.int8, device="meta")

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        def nelement(self) -> int:
            return 4

        def element_size(self) -> int:
            return 2

    model = SimpleNamespace(parameters=lambda: [Weight()], buffers=list)
    return bool(resolve(_class(module), _NAME)(model) == 8)


def patch(module: ModuleType, draft: Draft) -> None:
    def make(original):
        def get_memory_footprint(self, return_buffers=True):
            size = original(self, return_buffers) - _excess(self.parameters())
            return size - _excess(self.buffers()) if return_buffers else size

        return get_memory_footprint

    draft.wrap_plain(_class(module), _NAME, make)


def _class(module: ModuleType) -> Any:
    return resolve(module, _CLASSES[module.__name__])


def _excess(tensors: Iterable[Any]) -> int:
    """By how many bytes upstream's sum over ``tensors`` is larger than their memory."""
    wrappers = [tensor for tensor in tensors if is_wrapper(tensor)]
    inner = [getattr(holder, name) for wrapper in wrappers for holder, name in inner_places(wrapper)]
    return _bytes(wrappers) - _bytes(inner)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nelement() * tensor.element_size() for tensor in tensors)
