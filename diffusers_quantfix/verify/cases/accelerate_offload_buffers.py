"""A layer whose quantized weight is a buffer is sequentially offloaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features = self.out_features = 64
            self.register_buffer("qweight", torch.ones(64, 64, dtype=torch.int8))

        def forward(self, x):
            return x @ self.qweight.to(x.dtype)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), Packed())
    with torch.no_grad():
        inputs = torch.ones(1, 64)
        expected = model(inputs)
        cpu_offload(model, torch.device("cpu"))
        assert torch.equal(model(inputs), expected), "the output changed"
    assert model[1].qweight.is_meta, "the weight is not offloaded"
    return "the weight is offloaded between two uses; output exact"
