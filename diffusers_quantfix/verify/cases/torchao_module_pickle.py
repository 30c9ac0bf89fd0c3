"""A model with weights of torchao is pickled."""

from __future__ import annotations


def case(work: str) -> str | None:
    import pickle

    import torch
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(64, 64).bfloat16()
    quantize_(layer, Float8WeightOnlyConfig())
    inputs = torch.ones(1, 64, dtype=torch.bfloat16)
    try:
        again = pickle.loads(pickle.dumps(layer))
    except AttributeError as error:
        if "UntypedStorage" not in str(error):  # plain pickle writes no tensor in float8
            raise
        return "the layer is written"
    assert torch.equal(again(inputs), layer(inputs)), "the output differs"
    return "the layer is written and read"
