"""Group offloading with ``record_stream``: for which streams is the memory of a layer recorded?"""

from __future__ import annotations

from ..models import group_offload
from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    device = cuda()

    recorded = set()

    class Streams(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.record_stream.default:
                recorded.add(args[1].stream_id)
            return func(*args, **(kwargs or {}))

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    group_offload.apply(model, device, use_stream=True, record_stream=True)
    with torch.no_grad():
        model(torch.ones(1, 64, device=device))
        with Streams():
            model(torch.ones(1, 64, device=device))
    computing = torch.cuda.current_stream(device).stream_id
    assert computing in recorded, f"recorded for the streams {sorted(recorded)}, and {computing} computes"
    return "the memory of the layers is recorded for the stream that computes"
