"""GGUF weights in diffusers.

Upstream: diffusers/quantizers/gguf (``GGUFParameter``), from diffusers 0.32.0 on.
"""

from __future__ import annotations


def knows_gguf() -> bool:
    """Whether the installed diffusers has GGUF weights, by its version: peft asks during an import."""
    from ..engine.versions import is_installed

    return is_installed("diffusers", ">=0.32.0")
