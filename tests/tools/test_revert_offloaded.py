"""`revert` while a model is offloaded: nothing that it has is lost for good."""

from __future__ import annotations

import gc

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.offloading import live
from tests.fixes import lora_models
from tests.gate import unmet
from tests.marks import rest_is_whole
from tests.rig import models
from tests.sweep.backends import BACKENDS
from tests.sweep.placements import OFFLOADS, PLACEMENTS
from tests.tools.pipelines import flux

LEAF, BLOCK = {"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 1}
DISK = {"disk, leaf": LEAF, "disk, block": BLOCK, "disk, leaf, stream": {**LEAF, "use_stream": True}}


@pytest.fixture
def applied_again():
    yield
    qf.apply()


@pytest.mark.parametrize(
    ("bits", "mode", "stays"),
    [(4, "sequential", "bnb-quant-state-meta"), (8, "model", "bnb-linear8bit-move")],
)
def test_a_patch_without_which_a_live_model_would_be_damaged_stays(
    gpu, applied_again, tmp_path, bits, mode, stays
):
    """Before: "Cannot copy out of meta tensor; no data!" and "Expected all tensors to be on the same device", also
    after `apply`."""
    import torch

    if {answer.id: answer.state for answer in qf.status(load=False).answers}.get(stays) != "applied":
        pytest.skip(f"{stays} is not applied here")
    device = gpu.devices[0]
    pipeline = flux(tmp_path, bits)
    getattr(pipeline, f"enable_{mode}_cpu_offload")(device=device)
    wanted = models.call_flux(pipeline, device)
    for _ in range(2):
        board = {answer.id: answer for answer in qf.revert().answers}
        assert board[stays].state == "applied" and "not removed by revert(): " in board[stays].reason
        assert torch.equal(models.call_flux(pipeline, device), wanted)
        qf.apply()
        assert torch.equal(models.call_flux(pipeline, device), wanted)
    del pipeline
    gc.collect()
    assert {answer.id: answer.state for answer in qf.revert().answers}[stays] == "disabled"
    assert {answer.id: answer.state for answer in qf.apply().answers}[stays] == "applied"


def test_each_kind_of_model_is_looked_for_once(applied_again, monkeypatch):
    """A look at all objects of the process takes a fifth of a second, and twenty fixes ask for one."""
    qf.status()  # imports the libraries, and so patches them
    looks = []

    def look(*args, **kwargs):
        looks.append(args)
        return []

    monkeypatch.setattr(live, "objects_of", look)
    qf.revert()
    assert 1 <= len(looks) <= len(live.__all__)


@pytest.mark.long
def test_a_patch_that_stays_is_not_taken_off_for_a_moment(gpu, applied_again, tmp_path):
    """Before: a pass in another thread ran upstream's code meanwhile, and the quant states were lost for good."""
    import threading

    import torch

    stays = "bnb-quant-state-meta"
    if {answer.id: answer.state for answer in qf.status(load=False).answers}.get(stays) != "applied":
        pytest.skip(f"{stays} is not applied here")
    device = gpu.devices[0]
    pipeline = flux(tmp_path, 4)
    pipeline.enable_sequential_cpu_offload(device=device)
    wanted = models.call_flux(pipeline, device)
    ended, wrong = threading.Event(), []

    def run():
        while not ended.is_set():
            try:
                same = torch.equal(models.call_flux(pipeline, device), wanted)
            except Exception as error:
                wrong.append(error)
            else:
                wrong.extend([] if same else ["another result"])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(4):
            board = {answer.id: answer for answer in qf.revert().answers}
            assert board[stays].state == "applied"
            below = [answer for answer in board.values() if f"{stays} is installed over it" in answer.reason]
            assert below and all(answer.state == "applied" for answer in below)
            qf.apply()
    finally:
        ended.set()
        thread.join()
    assert not wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


def place(pipe, placement, gpu, folder):
    here = gpu.devices[0]
    if placement not in DISK:
        return PLACEMENTS[placement](pipe, here, gpu.devices[-1])
    pipe.transformer.enable_group_offload(
        onload_device=here, offload_device="cpu", offload_to_disk_path=str(folder / "disk"), **DISK[placement]
    )
    return here


@pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the sweep is about the newest releases")
@pytest.mark.parametrize(
    ("backend", "placement"),
    rest_is_whole(
        [(backend, placement) for backend in BACKENDS for placement in [*sorted(OFFLOADS), *DISK]
         if not (placement in DISK and backend.startswith(("quanto", "torchao")))],
        ("bnb-nf4", "group, leaf"), ("bnb-int8", "group, block, stream"), ("gguf", "sequential"),
        ("plain", "disk, leaf"), ("gguf", "disk, block"), ("quanto-int8", "sequential"),
        ("torchao-int8", "group, leaf, stream"),
    ),
)  # fmt: skip
def test_every_offloaded_model_runs_after_revert_and_after_apply(
    gpu, applied_again, tmp_path, saved, backend, placement
):
    """Before: an error of upstream, and groups on the disk computed with uninitialized memory, also after `apply`."""
    import torch

    pipe = models.flux_pipeline(BACKENDS[backend](saved, torch.bfloat16, None))
    device = place(pipe, placement, gpu, tmp_path)

    def run(pipe):
        return models.call_flux(pipe, device=device, dtype=torch.bfloat16).cpu()

    wanted = run(pipe)
    for answer in qf.revert().answers:
        assert answer.state != "applied" or "not removed by revert(): " in answer.reason
    assert torch.equal(run(pipe), wanted) and torch.equal(run(pipe), wanted), "after revert()"
    qf.apply()
    assert torch.equal(run(pipe), wanted), "after apply()"
    del pipe
    gc.collect()
    assert not [answer.id for answer in qf.revert().answers if answer.state == "applied"]


@pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the sweep is about the newest releases")
@pytest.mark.parametrize("backend", ["quanto-int8", "torchao-int8", "bnb-nf4", "bnb-int8"])
def test_what_can_take_a_merged_adapter_out_again_stays(gpu, applied_again, saved, backend):
    """Before: upstream's code took nothing out and said nothing, or raised an error and lost the model."""
    import torch

    pytest.importorskip("peft")
    device = gpu.devices[0]
    pipe = models.flux_pipeline(BACKENDS[backend](saved, torch.bfloat16, None))
    pipe.enable_sequential_cpu_offload(device=device)

    def run(pipe):
        return models.call_flux(pipe, device=device, dtype=torch.bfloat16).cpu()

    base = run(pipe)
    lora_models.load(pipe, "one")
    adapted = run(pipe)
    pipe.fuse_lora()
    fused = run(pipe)
    qf.revert()
    assert torch.equal(run(pipe), fused)
    pipe.unfuse_lora()
    assert torch.equal(run(pipe), adapted)
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe), base)
    del pipe
    gc.collect()
    assert not [answer.id for answer in qf.revert().answers if answer.state == "applied"]


def _normalized():
    import torch

    norm = torch.nn.utils.weight_norm
    return torch.nn.Sequential(norm(torch.nn.Conv1d(16, 16, 3, padding=1)), torch.nn.ELU())


class _Attends:
    """Modules whose ``forward`` reads weights of other modules without calling these."""

    def __new__(cls):
        import torch

        class Attends(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
                self.out = torch.nn.Linear(16, 16)

            def forward(self, value):
                return self.out(self.attention(value, value, value)[0])

        return Attends()


def _reads_a_list():
    import torch

    class Factors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = torch.nn.ParameterDict({"one": torch.nn.Parameter(torch.randn(16, 16))})
            self.shared = torch.nn.Linear(16, 16)

        def forward(self, value):
            return self.shared(value @ self.factors["one"])

    return Factors()


def _nested():
    import torch

    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                [torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)]) for _ in range(2)]
            )
            self.register_buffer("scale", torch.full((16,), 0.5))

        def forward(self, value):
            for block in self.blocks:
                for layer in block:
                    value = layer(value)
            return value * self.scale

    return Nested()


MADE = {
    "weight norm": _normalized,
    "attention": _Attends,
    "parameter dict": _reads_a_list,
    "nested lists": _nested,
}
WAYS = {
    "sequential": lambda model, device: _accelerate().cpu_offload(model, device),
    "sequential, to the CPU": lambda model, device: _accelerate().cpu_offload(model, "cpu"),
    "sequential, buffers": lambda model, device: _accelerate().cpu_offload(model, device, offload_buffers=True),
    "model": lambda model, device: _accelerate().cpu_offload_with_hook(model, device),
    "leaf": lambda model, device: _group(model, device, **LEAF),
    "leaf, stream": lambda model, device: _group(model, device, **LEAF, use_stream=True),
    "block": lambda model, device: _group(model, device, **BLOCK),
    "block, stream": lambda model, device: _group(model, device, **BLOCK, use_stream=True),
}  # fmt: skip


def _accelerate():
    return pytest.importorskip("accelerate")


def _group(model, device, **options):
    import torch
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, torch.device(device), torch.device("cpu"), **options)


@pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the sweep is about the newest releases")
@pytest.mark.parametrize(
    ("made", "way"),
    rest_is_whole(
        # diffusers offers no group offload of leaves for weight normalization.
        [(made, way) for made in MADE for way in WAYS if made != "weight norm" or not way.startswith("leaf")],
        ("weight norm", "sequential"), ("attention", "leaf"), ("parameter dict", "sequential, to the CPU"),
    ),
)  # fmt: skip
def test_an_offloaded_model_with_parts_is_exact_or_refused_after_revert(gpu, applied_again, made, way):
    """What hooks were given stays with them; what is asked at each move is upstream's again, with its error."""
    import torch

    here = gpu.devices[0]
    torch.manual_seed(0)
    model = MADE[made]().eval()
    inputs = torch.randn(1, 16, 16)
    placed = torch.device("cpu") if "CPU" in way else here

    def run():
        with torch.no_grad():
            return model(inputs.to(placed)).cpu()

    WAYS[way](model, placed)
    wanted = run()
    assert torch.equal(run(), wanted)
    for _ in range(2):
        qf.revert()
        for _ in range(2):
            try:
                output = run()
            except RuntimeError as error:
                assert "device" in str(error) or "type" in str(error), error
            else:
                assert torch.equal(output, wanted), "after revert()"
        qf.apply()
        assert torch.equal(run(), wanted) and torch.equal(run(), wanted), "after apply()"
