"""accelerate-fsdp-optimizer-shards: FSDP 1 does not load the state of the optimizer from shards."""

from __future__ import annotations

import logging
import types

import pytest

from diffusers_quantfix.fixes.accelerate import fsdp_optimizer_shards
from diffusers_quantfix.verify.models.fully_sharded import take_apart
from tests.gate import unmet

torch = pytest.importorskip("torch")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")

FIX_ID = "accelerate-fsdp-optimizer-shards"
# Nothing is said with accelerate's own optimizer; one that has a state is refused up to accelerate 1.12.
NEEDS = "accelerate>=1.7"
affected = pytest.mark.skipif(
    bool(unmet(NEEDS)), reason="accelerate before 1.7 asks for what is in the checkpoint"
)
SHOWS = "the state of the optimizer was not loaded|Missing key in checkpoint state_dict"
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "Adam, a tensor as rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2)),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    # torch's own, which also moves parameters whose gradient is zero
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.5),
}
ACCELERATOR = types.SimpleNamespace(process_index=0, wait_for_everyone=lambda: None)


@pytest.fixture
def group():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def plugin(monkeypatch):
    from torch.distributed.fsdp import (
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    # Its own wants an Accelerator.
    monkeypatch.setattr(fsdp_utils, "logger", logging.getLogger(__name__))
    return types.SimpleNamespace(
        fsdp_version=1,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=ShardedStateDictConfig(),
        optim_state_dict_config=ShardedOptimStateDictConfig(),
        cpu_offload=None,
    )


@pytest.fixture
def training(gpu, group):
    """Make (model under FSDP 1, optimizer); the models are taken apart afterwards, which no garbage collection can."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    made = []

    def make(optimizer="AdamW", whole=True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(gpu.devices[0])
        model[0].bias.requires_grad_(not whole)
        made.append(FullyShardedDataParallel(model, use_orig_params=whole, device_id=gpu.devices[0].index))
        return made[-1], OPTIMIZERS[optimizer](made[-1].parameters())

    yield make
    for model in made:
        take_apart(model)


def step(model, optimizer):
    for seed in range(2):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model(inputs.to(next(model.parameters()).device)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(optimizer):
    return [
        {name: torch.as_tensor(value).cpu().clone() for name, value in optimizer.state[one].items()}
        for group in optimizer.param_groups
        for one in group["params"]
        if one in optimizer.state
    ]


def assert_loaded(optimizer, expected):
    found = state_of(optimizer)
    same = len(found) == len(expected) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, expected, strict=True)
    )
    assert same, "the state of the optimizer was not loaded"


def values(model):
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("whole", [True, False], ids=["parameters", "flat"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_a_new_process_loads_the_state(training, plugin, tmp_path, kind, whole):
    model, optimizer = training(kind, whole)
    step(model, optimizer)
    expected = state_of(optimizer)
    assert expected
    fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    model, optimizer = training(kind, whole)
    before = values(model)
    gradients = [torch.ones_like(one) for one in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient if parameter.requires_grad else None
    fsdp_utils.load_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    assert_loaded(optimizer, expected)
    assert all(map(torch.equal, values(model), before))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is (gradient if parameter.requires_grad else None)
        assert torch.equal(gradient, torch.ones_like(gradient))
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)
    assert "state_dict" not in vars(optimizer)


@pytest.mark.defect(FIX_ID, shows="Missing key in checkpoint state_dict", needs="accelerate>=1.7,<1.13")
def test_a_state_is_replaced(training, plugin, tmp_path):
    """As one does who goes back to the last checkpoint: releases that ask with numbers cannot.

    They also take a folder with "optimizer" in its path, as pytest makes one for a test of that name, for the shards.
    """
    from torch.distributed.checkpoint import CheckpointException

    model, optimizer = training()
    step(model, optimizer)
    expected = state_of(optimizer)
    fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    step(model, optimizer)
    try:
        fsdp_utils.load_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    except CheckpointException as error:  # no Exception
        raise RuntimeError(str(error)) from error
    assert_loaded(optimizer, expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_through_the_wrapper_of_accelerate(training, plugin, tmp_path):
    """Keywords, a second optimizer, and a scheduler that counts the steps."""
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import PartialState

    PartialState()
    try:
        model, optimizer = training()
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        step(model, optimizer)
        expected = state_of(optimizer)
        fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path), 1)
        model, optimizer = training()
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        counted = getattr(optimizer, "_opt_called", False)
        wrapper = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
        vars(wrapper).update(optimizer=optimizer, scaler=None, device_placement=False)
        wrapper.accelerator_state = types.SimpleNamespace(distributed_type="FSDP")
        fsdp_utils.load_fsdp_optimizer(
            fsdp_plugin=plugin, accelerator=ACCELERATOR, optimizer=wrapper, model=model,
            input_dir=str(tmp_path), optimizer_index=1,
        )  # fmt: skip
        assert_loaded(optimizer, expected)
        assert getattr(optimizer, "_opt_called", False) == counted
        assert "state_dict" not in vars(wrapper)
    finally:
        PartialState._reset_state()


@affected
def test_a_checkpoint_from_before_the_first_step(training, plugin, tmp_path):
    model, optimizer = training()
    fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    model, optimizer = training()
    fsdp_utils.load_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    assert not state_of(optimizer)


def test_a_file_with_all_of_it(training, plugin, tmp_path, monkeypatch):
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

    monkeypatch.setattr(fsdp_optimizer_shards, "make_entries", None)
    plugin.state_dict_type = StateDictType.FULL_STATE_DICT
    plugin.state_dict_config, plugin.optim_state_dict_config = (
        FullStateDictConfig(),
        FullOptimStateDictConfig(),
    )
    model, optimizer = training()
    step(model, optimizer)
    expected = state_of(optimizer)
    fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    model, optimizer = training()
    fsdp_utils.load_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    assert_loaded(optimizer, expected)


@pytest.fixture
def saved(training, plugin, tmp_path):
    model, optimizer = training()
    step(model, optimizer)
    fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, str(tmp_path))
    return str(tmp_path)


@affected
def test_an_interrupted_load_leaves_nothing(training, plugin, saved, monkeypatch):
    import torch.distributed.checkpoint as dist_cp

    model, optimizer = training()
    before = values(model)
    with monkeypatch.context() as patch:
        patch.setattr(dist_cp, "load", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fsdp_utils.load_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, saved)
    assert not optimizer.state and "state_dict" not in vars(optimizer)
    assert all(map(torch.equal, values(model), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_one_that_cannot_step_without_a_closure(training, saved, error):
    class Optimizer(torch.optim.AdamW):
        def step(self, closure=None):
            super().step()
            raise error("closure")

    model, _ = training()
    before = values(model)
    optimizer = Optimizer(model.parameters(), weight_decay=0.5)
    assert fsdp_optimizer_shards.holds_states(saved, "optimizer_0")
    assert not fsdp_optimizer_shards.holds_states(saved, "optimizer_1")
    expected, match = (RuntimeError, "FULL_STATE_DICT") if error is TypeError else (error, "")
    with pytest.raises(expected, match=match):
        fsdp_optimizer_shards.make_entries(optimizer)
    assert not optimizer.state and all(map(torch.equal, values(model), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("FSDP.optim_state_dict_to_load(); FileSystemReader()", True),
        ("FSDP.optim_state_dict_to_load(); FileSystemReader(); _init_optim_state()", False),
        ("load_sharded_optimizer_state_dict(FileSystemReader()); FSDP.optim_state_dict_to_load()", False),
        ("set_optimizer_state_dict()", False),
    ],
)
def test_the_probe(body, expected):
    held = {}
    exec(f"def load_fsdp_optimizer(): {body}", held)
    assert fsdp_optimizer_shards.broken(types.SimpleNamespace(**held)) is expected
