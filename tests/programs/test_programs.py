"""Each program without the package and with it: the same output, or the bug of upstream that it would meet."""

from __future__ import annotations

import functools
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


FULLY_SHARDED = "FullyShardedDataParallel on devices"
TOGETHER = {
    "ddp": ["nf4", "nf4-double", "int8", "quanto-int8"],
    "fully_shard": [
        "nf4-float32", "nf4-bfloat16", "nf4-double-float16", "quanto-int8",
        "loaded-nf4-float32", "loaded-nf4-bfloat16",
    ],
    FULLY_SHARDED: ["nf4-float32", "nf4-bfloat16", "loaded-nf4-double-float32", "loaded-nf4-bfloat16"],
}  # fmt: skip


def skip_where_it_cannot_run(way, request) -> None:
    if way == "fully_shard" and (sentence := unmet("torch>=2.8")):
        pytest.skip(f"fully_shard does not run on the CPU: {sentence}")
    if way == FULLY_SHARDED and len(request.getfixturevalue("gpu").devices) < 2:
        pytest.skip("each of the two processes wants a GPU")


def assert_trained_as_one_process(told, way, kinds) -> None:
    assert list(told) == kinds
    for kind, one in told.items():
        assert one["equal in both processes"] and one["resumed"], kind
        # The sums over the batch are taken in another order.  bfloat16 is rounded otherwise for another batch size, by
        # instructions for it and without them, and the whole model may be bfloat16.
        limit = 1e-5 if "bfloat16" not in kind else 1e-2 if way == FULLY_SHARDED else 1e-3
        assert one["off"] <= limit, f"{kind}: relative error of losses and gradients: {one['off']:.2g}"


@pytest.mark.parametrize("way", TOGETHER)
def test_two_processes_train_together(llama, tmp_path, way, request) -> None:
    pytest.importorskip("peft")
    skip_where_it_cannot_run(way, request)
    told = both("distributed", tmp_path, llama, way, *TOGETHER[way])
    assert_trained_as_one_process(told, way, TOGETHER[way])


@pytest.mark.parametrize("way", ["fully_shard", FULLY_SHARDED])
def test_two_processes_train_a_model_of_diffusers(gpu, flux, tmp_path, way, request) -> None:
    """Without the package no checkpoint with a floating storage is loaded (diffusers-4bit-storage), and what is loaded
    cannot be sharded (torch-sharded-loaded-4bit).
    """
    pytest.importorskip("peft")
    skip_where_it_cannot_run(way, request)
    as_bytes = ["loaded-nf4"] if way == "fully_shard" and not unmet("torch>=2.10") else []
    kinds = [*as_bytes, "loaded-nf4-float32", "loaded-nf4-bfloat16", "nf4-float32"]
    fails = "quant_state is required" if as_bytes else "Expected the flattened shape of the current param"
    told = both("distributed", tmp_path, flux, way, *kinds, fails=fails)
    assert_trained_as_one_process(told, way, kinds)


def test_fully_sharded_data_parallel_needs_an_accelerator(llama, tmp_path) -> None:
    """torch's own refusal, before anything is sharded."""
    with pytest.raises(Failed, match="FSDP needs a non-CPU accelerator device"):
        run("distributed", tmp_path, llama, "FullyShardedDataParallel", "nf4-float32")


def test_accelerate_refuses_fsdp_on_the_cpu(llama, tmp_path) -> None:
    """accelerate's own refusal, before the program starts."""
    with pytest.raises(Failed, match=r"You can only use one of `--cpu`, .* `--use_fsdp` at a time"):
        run("qlora", tmp_path, llama, "nf4", launcher=launch("--num_processes", "2", "--use_fsdp"))


def launch_on_devices(*options) -> tuple[str, ...]:
    return ("-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--main_process_port", "0", *options)  # fmt: skip


def launch_sharded(version, saved_as) -> tuple[str, ...]:
    own = {
        1: ("--fsdp_use_orig_params", "true", "--fsdp_sync_module_states", "false"),
        2: ("--fsdp_reshard_after_forward", "true"),
    }
    return launch_on_devices(
        "--num_processes", "2", "--use_fsdp", "--fsdp_version", str(version), "--fsdp_state_dict_type", saved_as,
        "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_cpu_ram_efficient_loading", "false",
        *own[version],
    )  # fmt: skip


# With FSDP 1 `Accelerator.load_state` refuses what `save_state` wrote (bnb-linear4bit-reload), without the package.
REFUSED = r'weight\.quant_state\.bitsandbytes__nf4"'


@pytest.fixture(scope="module")
def trained_alone(llama, tmp_path_factory):
    """What the training of one process tells, with the whole batch on one device."""
    launcher = launch_on_devices("--num_processes", "1")
    return functools.cache(
        lambda kind: run("qlora_sharded", tmp_path_factory.mktemp("alone"), llama, kind, launcher=launcher)
    )


@pytest.mark.parametrize(
    ("version", "saved_as", "kind", "fails"),
    [
        (1, "FULL_STATE_DICT", "nf4-bfloat16", REFUSED),
        (2, "SHARDED_STATE_DICT", "nf4-bfloat16", ""),
        pytest.param(1, "FULL_STATE_DICT", "nf4-float32", REFUSED, marks=pytest.mark.whole),
        pytest.param(2, "FULL_STATE_DICT", "nf4-float32", "", marks=pytest.mark.whole),
    ],
    ids=lambda value: None if value == REFUSED else str(value),
)
def test_accelerate_launches_a_sharded_training(
    gpu, llama, tmp_path, trained_alone, version, saved_as, kind, fails, request
) -> None:
    pytest.importorskip("peft")
    skip_where_it_cannot_run(FULLY_SHARDED, request)
    alone, launcher = trained_alone(kind), launch_sharded(version, saved_as)
    together = both("qlora_sharded", tmp_path, llama, kind, launcher=launcher)
    assert (together["processes"], alone["processes"]) == (2, 1)
    assert together["model"].startswith({1: "FullyShardedDataParallel", 2: "FSDP"}[version])
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    resumed = both("qlora_sharded", tmp_path, llama, kind, "resume", launcher=launcher, fails=fails)
    assert resumed["losses"] == together["losses"][2:]
    assert resumed["adapter"] == together["adapter"]


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["float32", "nf4-float32"])
def test_fsdp_1_loads_the_state_of_the_optimizer_from_shards(gpu, llama, tmp_path, kind, request) -> None:
    """Without the package the adapter is right and the second step is not (accelerate-fsdp-optimizer-shards), and a
    quantized model is refused before that.
    """
    pytest.importorskip("peft")
    skip_where_it_cannot_run(FULLY_SHARDED, request)
    launcher = launch_sharded(1, "SHARDED_STATE_DICT")
    at_once = both("qlora_sharded", tmp_path, llama, kind, launcher=launcher)
    if kind == "float32":
        without = run("qlora_sharded", tmp_path, llama, kind, "resume", launcher=launcher, package=False)
        assert without["losses"][0] == at_once["losses"][2]
        assert without["losses"][1] != at_once["losses"][3]
    else:
        with pytest.raises(Failed, match=REFUSED):
            run("qlora_sharded", tmp_path, llama, kind, "resume", launcher=launcher, package=False)
    resumed = run("qlora_sharded", tmp_path, llama, kind, "resume", launcher=launcher)
    assert resumed["losses"] == at_once["losses"][2:]
    assert resumed["adapter"] == at_once["adapter"]


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
