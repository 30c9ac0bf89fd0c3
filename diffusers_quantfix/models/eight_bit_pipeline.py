"""``.to()`` of a pipeline with 8-bit components, for both kinds of pipelines of diffusers.

Upstream warns for each 8-bit component that it cannot be moved, and does not move it. Here upstream moves everything
else, with its other warnings (such as float16 on a CPU); its warning about the components that can move is suppressed,
and they are moved.

Upstream: diffusers/pipelines/pipeline_utils.py, diffusers/modular_pipelines/modular_pipeline.py.
"""

from __future__ import annotations

import contextlib

from . import eight_bit

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

__all__ = ["REFUSAL", "movable", "moving_to"]

REFUSAL = "8bit and moving it to"  # part of the warning that is no longer true


def moving_to(original: Callable[..., Any], logger: logging.Logger) -> Callable[..., Any]:
    """``original``, the ``to`` of a pipeline class which logs to ``logger``, with the move of 8-bit components."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = eight_bit.asked_device(args, kwargs)
        models = [] if device is None else movable(self.components.values())
        if not models:
            return original(self, *args, **kwargs)
        with _without_refusal(logger, models):
            result = original(self, *args, **kwargs)
        for model in models:
            eight_bit.move(model, device)
        return result

    return to


def movable(components: Iterable[Any]) -> list[Any]:
    """The components, which may be anything, that are 8-bit models and can move."""
    return [part for part in components if eight_bit.is_8bit(part) and eight_bit.can_move(part)]


@contextlib.contextmanager
def _without_refusal(logger: logging.Logger, models: list[Any]) -> Iterator[None]:
    names = [f"The module '{type(model).__name__}'" for model in models]

    def keep(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        return not (REFUSAL in said and said.startswith(tuple(names)))

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
