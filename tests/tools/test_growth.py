"""What the tools look at grows with the number of layers only: counted, not timed."""

from __future__ import annotations

import pytest

import diffusers_quantfix as qf


class _Counted(dict):
    """A dict of weights that counts how often one is looked at."""

    looks = 0

    def __iter__(self):
        for key in super().__iter__():
            type(self).looks += 1
            yield key

    def items(self):
        return [(key, self[key]) for key in self]


@pytest.mark.parametrize("layers", [8, 64])
def test_the_weights_of_a_sequentially_offloaded_model_are_listed_once(layers):
    pytest.importorskip("accelerate")
    import torch
    from accelerate import cpu_offload

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)])
    weights = _Counted(model.state_dict())
    cpu_offload(model, torch.device("cpu"), state_dict=weights)
    _Counted.looks = 0
    audit = qf.audit(model)
    assert [record.kind for record in audit.tensors].count("offloaded") == 2 * layers
    assert _Counted.looks <= 4 * len(weights)


def test_a_module_that_is_its_own_descendant_is_met_once():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].add_module("parent", model)
    assert len(qf.audit(model).tensors) == 2
    with qf.track(model) as memory:
        pass
    assert memory.samples[0].components["Sequential"]["cpu"] == 80
    assert qf.release(model).ok
