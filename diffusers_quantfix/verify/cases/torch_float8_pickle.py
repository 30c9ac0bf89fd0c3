"""Float8 weights are pickled and read."""

from __future__ import annotations


def case(work: str) -> str | None:
    import pickle

    import torch

    weights = torch.linspace(-2, 2, 64).to(torch.float8_e4m3fn)
    read = pickle.loads(pickle.dumps(weights))
    assert torch.equal(read.float(), weights.float()), "the values differ"
    return "the values are those that were pickled"
