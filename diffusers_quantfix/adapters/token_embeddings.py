"""The text encoders that a textual inversion is loaded into.

Upstream: diffusers/loaders/textual_inversion.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["text_encoders"]


def text_encoders(pipeline: Any, given: Iterable[Any]) -> list[Any]:
    """The text encoders of ``pipeline``, and those that are passed to its method: nothing else has token embeddings.

    Args:
        pipeline: with a dict ``components``, or any object, which has none.
        given: the arguments of the method.
    """
    components = getattr(pipeline, "components", None)
    parts = [*(components.values() if isinstance(components, dict) else ()), *given]
    return list({id(part): part for part in parts if hasattr(part, "get_input_embeddings")}.values())
