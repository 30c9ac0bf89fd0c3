"""A training step of a model under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, where)
    try:
        model(torch.ones(1, 8)).sum().backward()
    except ValueError as error:
        assert "trainable weights of this model are offloaded" in str(error)
        return "refused with a clear error"
    optimizer.step()
    after = model._hf_hook and {name: model[int(name[0])]._hf_hook.weights_map[name[2:]] for name in before}
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed, "the training step changed no weight"
    return "trains"
