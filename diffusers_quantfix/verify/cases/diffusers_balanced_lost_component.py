"""Three components are assigned to a device that has room for one of them."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers.pipelines.pipeline_loading_utils import _assign_components_to_devices

    sizes = {"transformer": 9, "text_encoder": 8, "vae": 3}
    assigned = _assign_components_to_devices(sizes, {0: 4})
    lost = set(sizes) - {name for names in assigned.values() for name in names}
    assert not lost, f"the device map lacks {', '.join(sorted(lost))}: {assigned}"
    return f"the device map has every component: {assigned}"
