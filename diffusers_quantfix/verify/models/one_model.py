"""A pipeline of a transformer alone."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def pipeline(transformer: Any) -> Any:
    """A DiffusionPipeline with one component, ``transformer``, that is moved and never called."""
    from diffusers import DiffusionPipeline

    class OneModel(DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, transformer: Any) -> None:
            super().__init__()
            self.register_modules(transformer=transformer)

    return OneModel(transformer)
