"""A GGUF Flux transformer runs compiled."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..case import CannotReproduce
    from ..models import four_bit, gguf_model

    cpu = torch.device("cpu")
    model = gguf_model.flux(work)
    expected = four_bit.run_flux(model, cpu)
    try:
        model.compile(backend="aot_eager")
        output = four_bit.run_flux(model, cpu)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.InternalTorchDynamoError) as reason:
        raise CannotReproduce(f"this torch cannot compile it: {reason}") from reason
    assert type(output) is torch.Tensor, f"the output of the compiled model is a {type(output).__name__}"
    assert torch.equal(output, expected), "the output differs from that of the model that is not compiled"
    return "the compiled model's output is a tensor, and exact"
