"""An IP-Adapter is loaded into a Stable Diffusion 3 transformer."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import ip_adapter

    return ip_adapter.check("sd3", grouped=False)
