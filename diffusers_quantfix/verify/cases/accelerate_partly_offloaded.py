"""A transformer, and a ControlNet with its first layer, under model offload; then inputs on the CPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload_with_hook

    from ..models import four_bit

    where = four_bit.device()
    if where.type == "cpu":  # not the device of the second layer
        return _without_a_device()
    torch.manual_seed(0)
    shared, one, other = (torch.nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
    models = [torch.nn.Sequential(shared, layer).to(where) for layer in (one, other)]
    inputs = torch.randn(2, 8, device=where)
    expected = models[0](models[1](inputs))
    for model in models:
        cpu_offload_with_hook(model.cpu(), where)
    assert torch.equal(models[0](models[1](inputs)), expected), "the output differs"
    assert torch.equal(models[0](models[1](inputs.cpu())), expected), (
        "the output of inputs on the CPU differs"
    )
    return "both models run, also from inputs on the CPU; output exact"


def _without_a_device() -> str:
    import torch
    from accelerate.hooks import CpuOffload

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))
    try:
        CpuOffload(execution_device=torch.device("cpu")).pre_forward(model)
    except NotImplementedError:  # meta tensors cannot be moved
        return "a layer that is elsewhere is moved to the device"
    raise AssertionError("a layer that is elsewhere is left where it is")
