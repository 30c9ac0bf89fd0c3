"""An IP-Adapter is loaded into a group-offloaded UNet."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import ip_adapter

    return ip_adapter.check("unet", grouped=True)
