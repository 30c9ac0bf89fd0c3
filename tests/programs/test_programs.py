"""Each program without the package and with it: the same output, or the bug of upstream that it would meet."""

from __future__ import annotations

import re

import pytest

from tests.gate import unmet
from tests.programs.harness import Failed, need, run
from tests.rig import models

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the programs are about the newest releases"),
]


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return models.saved(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


def both(program, folder, *arguments, fails="", **options):
    """What a program tells with the package; without it the same, or an error that matches ``fails``."""
    told = run(program, folder, *arguments, **options)
    try:
        without = run(program, folder, *arguments, package=False, **options)
    except Failed as error:
        assert fails and re.search(fails, str(error)), error
        return told
    assert not fails, f"it should have ended with {fails}"
    assert without == told
    return told


def test_a_server_that_swaps_pipelines(gpu, flux, tmp_path) -> None:
    told = both("server", tmp_path, flux)
    assert [len(found) for found in told["answers"].values()] == [1, 1] and told["swapped"]
    assert told["left on the device"] == 0


def test_a_host_that_loads_plugins_later(gpu, flux, tmp_path) -> None:
    without = run("comfy_host", tmp_path, flux, package=False)
    told = run("comfy_host", tmp_path, flux)
    assert without["told"] == told["told"] and len(set(told["told"])) == 1
    assert "applied" in told["states"] and not {"failed", "candidate", "overwritten"} & set(told["states"])


def launch(*options) -> tuple[str, ...]:
    return ("-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", *options)  # fmt: skip


def test_a_training_that_is_killed_and_resumed(llama, tmp_path) -> None:
    pytest.importorskip("peft")
    one = launch("--num_processes", "1")
    at_once = both("qlora", tmp_path, llama, "nf4", launcher=one)
    killed = tmp_path / "killed"
    for package in (True, False):
        with pytest.raises(Failed, match="exit status -9"):
            run("qlora", killed, llama, "nf4", "die", package=package, launcher=one)
    # Without the package `Accelerator.load_state` refuses what `save_state` wrote: bnb-linear4bit-reload.
    refusal = r"Unexpected key\(s\) in state_dict: .*weight\.absmax"
    resumed = both("qlora", killed, llama, "nf4", "resume", launcher=one, fails=refusal)
    assert resumed["losses"] == at_once["losses"][2:]
    assert resumed["adapter"] == at_once["adapter"]


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["int8", "quanto-int8"])
def test_a_training_of_another_kind_is_resumed(llama, tmp_path, kind) -> None:
    """These resume without the package too."""
    pytest.importorskip("peft")
    need(*(["optimum.quanto"] if kind == "quanto-int8" else []))
    one = launch("--num_processes", "1")
    at_once = run("qlora", tmp_path, llama, kind, launcher=one)
    resumed = run("qlora", tmp_path, llama, kind, "resume", launcher=one)
    assert resumed["losses"] == at_once["losses"][2:]
    assert resumed["adapter"] == at_once["adapter"]


TOGETHER = {
    "ddp": ["nf4", "nf4-double", "int8", "quanto-int8"],
    "fully_shard": ["nf4-float32", "nf4-bfloat16", "nf4-double-float16", "quanto-int8"],
}


@pytest.mark.parametrize("way", TOGETHER)
def test_two_processes_train_together(llama, tmp_path, way) -> None:
    """Not `FullyShardedDataParallel`, nor `accelerate launch --use_fsdp`: see the next two tests."""
    pytest.importorskip("peft")
    if way == "fully_shard" and (sentence := unmet("torch>=2.8")):
        pytest.skip(f"fully_shard does not run on the CPU: {sentence}")
    told = both("distributed", tmp_path, llama, way, *TOGETHER[way])
    assert list(told) == TOGETHER[way]
    for kind, one in told.items():
        assert one["equal in both processes"] and one["resumed"], kind
        # The sums over the batch are taken in another order.
        assert one["off"] <= 1e-5, f"{kind}: relative error of losses and gradients: {one['off']:.2g}"


def test_fully_sharded_data_parallel_needs_an_accelerator(llama, tmp_path) -> None:
    """torch's own refusal, before anything is sharded."""
    with pytest.raises(Failed, match="FSDP needs a non-CPU accelerator device"):
        run("distributed", tmp_path, llama, "FullyShardedDataParallel", "nf4-float32")


def test_accelerate_refuses_fsdp_on_the_cpu(llama, tmp_path) -> None:
    """accelerate's own refusal, before the program starts."""
    with pytest.raises(Failed, match=r"You can only use one of `--cpu`, .* `--use_fsdp` at a time"):
        run("qlora", tmp_path, llama, "nf4", launcher=launch("--num_processes", "2", "--use_fsdp"))


def test_workers_receive_a_quantized_model(llama, tmp_path) -> None:
    assert both("pool", tmp_path, llama)["as in the workers"]


def test_forked_workers_encode_with_a_quantized_model(llama, tmp_path) -> None:
    told = both("forked", tmp_path, llama)
    for name in ("4 bits", "8 bits"):
        assert told[f"{name}, here"] == told[f"{name}, never run before"] == told[f"{name}, run before"]
    assert told["pool, never run before"] == told["pool, run before"]


def test_own_modules_are_reloaded(gpu, flux, tmp_path) -> None:
    assert len(set(both("reloading", tmp_path, flux)["told"])) == 1


def test_a_notebook(gpu, flux, tmp_path) -> None:
    need("nbclient", "ipykernel")
    told = both("notebook", tmp_path, flux)
    assert len(set(told["told"])) == 1 and not told["standard output"]
