"""quanto-share-memory and torchao-share-memory: ``share_memory()`` of models with wrappers as weights."""

from __future__ import annotations

import faulthandler
import os

import pytest

from tests.fixes import quanto_models as q
from tests.fixes import torchao_models as ao
from tests.gate import unmet

QUANTO, TORCHAO = "quanto-share-memory", "torchao-share-memory"
SHOWS = r"the process ended with -11|False"
# With the id of the fix, and how to run a model of it
KINDS = [(QUANTO, qtype) for qtype in q.QTYPES] + [(TORCHAO, weights) for weights in (*ao.WEIGHTS, "int4")]
EACH = [pytest.param(fix, kind, marks=pytest.mark.defect(fix, shows=SHOWS), id=kind) for fix, kind in KINDS]


def quanto_dtype():
    """Before 0.2.7 quanto packs 4 bits in bfloat16 for a GPU, on the CPU too."""
    import torch

    return torch.float32 if unmet("optimum-quanto>=0.2.7") else torch.bfloat16


def layers(fix: str, kind: str):
    return q.layers(kind, quanto_dtype()) if fix == QUANTO else ao.layers(kind)


def run(fix: str, model):
    return q.run(model, quanto_dtype()) if fix == QUANTO else ao.run(model)


def plain(tensor):
    """The plain tensors inside."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [one for name in tensor.__tensor_flatten__()[0] for one in plain(getattr(tensor, name))]


def in_a_fork(work) -> None:
    """Do it in a process of its own, which it may end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            faulthandler.disable()
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the process ended with {code}"


@pytest.mark.parametrize(("fix", "kind"), EACH)
def test_the_process_lives_on(fix, kind):
    model = layers(fix, kind)
    in_a_fork(model.share_memory)


@pytest.mark.parametrize(("fix", "kind"), EACH)
def test_a_weight_whose_bytes_are_shared_says_so(fix, kind):
    model = layers(fix, kind)
    assert not model[0].weight.is_shared()
    for tensor in plain(model[0].weight):
        tensor.share_memory_()
    assert model[0].weight.is_shared() is True


@pytest.mark.parametrize(("fix", "kind"), KINDS)
def test_another_process_has_the_same_bytes(side, fix, kind):
    import torch

    if side == "bare":
        pytest.skip("it ends the process")
    model = layers(fix, kind)
    before, names = run(fix, model), dict(model.named_parameters())
    trained = [parameter.requires_grad for parameter in names.values()]
    assert model.share_memory() is model
    weight = model[0].weight
    assert isinstance(weight, torch.nn.Parameter)
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert all(names[name] is parameter for name, parameter in model.named_parameters())
    assert torch.equal(run(fix, model), before)

    def zeros():
        with torch.no_grad():
            for tensor in plain(weight):
                tensor.zero_()

    in_a_fork(zeros)
    assert all(not tensor.to(torch.float32).any() for tensor in plain(weight))


@pytest.mark.parametrize(("fix", "kind"), KINDS)
def test_shared_weights_move_and_are_copied(side, gpu, fix, kind):
    """A GPU's memory is shared as it is."""
    import copy

    import torch

    if side == "bare":
        pytest.skip("it ends the process")
    model = layers(fix, kind)
    expected = run(fix, model)
    twin = copy.deepcopy(model.share_memory())
    assert torch.equal(run(fix, twin), expected)
    assert twin[0].weight.is_shared() is False or plain(twin[0].weight)[0].is_shared()
    model.to(gpu.devices[0])
    assert model.share_memory()[0].weight.is_shared()
    assert {str(tensor.device) for tensor in plain(model[0].weight)} == {str(gpu.devices[0])}
    assert torch.equal(run(fix, model.to("cpu")), expected)
