"""Models with quanto weights run under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import quanto_models

    for qtype in quanto_models.QTYPES:
        model = quanto_models.layers(qtype)
        reference = quanto_models.run(model)
        cpu_offload(model, torch.device("cpu"))
        assert model[0].weight.is_meta, "nothing is offloaded"
        assert torch.equal(quanto_models.run(model), reference), f"{qtype}: the output differs"
    return f"output exact under sequential offload with {', '.join(quanto_models.QTYPES)}"
