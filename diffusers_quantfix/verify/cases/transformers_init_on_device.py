"""Two threads make models without weights at once; layers are made meanwhile and afterwards."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    import transformers.integrations.accelerate as integration

    from ..models.threads import kept, overlapping

    def device() -> str:
        return str(torch.nn.Linear(1, 1).weight.device)

    # Since 5.0 it is torch that makes models without weights, for one thread.
    context = getattr(integration, "init_empty_weights", lambda: torch.device("meta"))
    with kept((torch.nn.Module, "register_parameter")):
        meanwhile = overlapping(context, device)
        afterwards = device()
    assert afterwards == "cpu", f"all new layers are on {afterwards}"
    assert meanwhile == "cpu", f"a layer of another thread is on {meanwhile}"
    return "new layers have weights, meanwhile and afterwards"
