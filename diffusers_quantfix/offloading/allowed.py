"""Models whose class says that they cannot be offloaded in groups, and that are allowed to be.

Upstream: diffusers/models/modeling_utils.py (``ModelMixin.enable_group_offload``).
"""

from __future__ import annotations

from ..engine.probe import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ..engine.draft import Draft

__all__ = ["allow_group_offload", "refuses_group_offload"]

_FLAG = "_supports_group_offloading"


def refuses_group_offload(module: ModuleType, name: str) -> bool:
    """Whether the class of that name in ``module`` refuses it; for probes."""
    return resolve(module, f"{name}.{_FLAG}") is False


def allow_group_offload(draft: Draft, module: ModuleType, name: str) -> None:
    """Let the class of that name in ``module`` allow it."""
    draft.replace(resolve(module, name), _FLAG, True)
