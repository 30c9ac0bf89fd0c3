"""Finds the owner of a parameter by its name."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["parameters_at"]


def parameters_at(module: Any, path: str) -> tuple[dict[str, Any], str]:
    """The ``_parameters`` of the module that owns ``path``, or {} without such a module, and the name there.

    For code that runs once per loaded tensor: ``Module.get_submodule`` takes ten times as long.

    Args:
        module: the ``torch.nn.Module`` from which ``path`` starts.
        path: a name as in ``named_parameters``.
    """
    *parents, name = path.split(".")
    try:
        for parent in parents:
            known = module._modules.get(parent)
            module = getattr(module, parent) if known is None else known
        return module._parameters, name
    except AttributeError:
        return {}, name
