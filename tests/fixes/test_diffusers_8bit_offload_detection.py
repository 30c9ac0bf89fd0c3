"""diffusers-8bit-offload-detection: an 8-bit model makes a pipeline believe that it is sequentially offloaded."""

from __future__ import annotations

import threading

import pytest

from diffusers_quantfix.verify.cases.diffusers_8bit_offload_detection import warnings_of
from tests.fixes.callers import each_spelling as each_spelling
from tests.fixes.callers import spelled
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-8bit-offload-detection"
FLOAT16_ON_CPU = "Pipelines loaded with `dtype=torch.float16` cannot run with `cpu` device"
SILENT = "was silent about float16 on the CPU"
SHOWS = f"AssertionError: .*{SILENT}"

before_0_34 = pytest.mark.skipif(
    bool(unmet("diffusers<0.34")), reason="looks into the patch, which is not there"
)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
def test_model_of_diffusers_is_not_taken_for_offloaded(gpu, tmp_path, side):
    """Since 0.33.0 diffusers dispatches its own quantized models."""
    pipe = models.flux_pipeline(eight_bit_transformer(tmp_path, side))
    assert_says_float16_on_cpu(pipe)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers<0.33", "accelerate<1.2"))
def test_text_encoder_is_not_taken_for_offloaded(gpu, tmp_path):
    """Before 1.2 accelerate put the hook on 4-bit models too, and the rig has no 8 bits for those bitsandbytes."""
    pipe = models.flux_pipeline(text_encoder=text_encoder(tmp_path, bits=4))
    assert_says_float16_on_cpu(pipe)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers<0.34", "bitsandbytes>=0.45"))
def test_text_encoder_on_two_devices_is_not_taken_for_offloaded(gpu, tmp_path):
    """A model that is spread has hooks in every release. The later releases judge it otherwise, for other reasons."""
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    halves = {"text_model.embeddings": 0, "text_model.encoder": 0, "text_model.final_layer_norm": 1}
    pipe = models.flux_pipeline(text_encoder=text_encoder(tmp_path, bits=8, device_map=halves))
    assert_says_float16_on_cpu(pipe)


@before_0_34
@pytest.mark.usefixtures("each_spelling")
def test_offloaded_8bit_model_counts_as_offloaded(gpu, tmp_path):
    from accelerate import cpu_offload

    encoder = text_encoder(tmp_path, bits=8)
    pipe = models.flux_pipeline(text_encoder=encoder)
    assert_says_float16_on_cpu(pipe)
    cpu_offload(encoder, spelled(gpu.devices[0]))
    assert FLOAT16_ON_CPU not in warnings_of(lambda: pipe.to("cpu"))


@before_0_34
@pytest.mark.usefixtures("each_spelling")
def test_unquantized_models_are_judged_by_upstream(gpu):
    from accelerate import cpu_offload, dispatch_model

    for move in (
        lambda model: cpu_offload(model, spelled(gpu.devices[0])),
        lambda model: dispatch_model(model, {"": 0}, force_hooks=True),
    ):
        pipe = models.flux_pipeline()
        move(pipe.transformer)
        with pytest.raises(ValueError, match="you have activated sequential model offloading"):
            pipe.to("cuda")


@before_0_34
def test_revert_restores_the_code_and_apply_brings_it_back(gpu, tmp_path):
    from diffusers import DiffusionPipeline

    import diffusers_quantfix

    pipe = models.flux_pipeline(text_encoder=hooked(text_encoder(tmp_path, bits=4)))
    ours = DiffusionPipeline.to.__code__
    changed = f"{DiffusionPipeline.__module__}.DiffusionPipeline.to"
    answers = diffusers_quantfix.status()
    around = {FIX_ID} | {answer.id for answer in answers if changed in answer.changes}
    diffusers_quantfix.revert(*around)
    try:
        assert DiffusionPipeline.to.__code__ is not ours
        with pytest.raises(AssertionError, match=SILENT):
            assert_says_float16_on_cpu(pipe)
    finally:
        diffusers_quantfix.apply(*around)
    assert_says_float16_on_cpu(pipe)


@before_0_34
def test_threads_and_errors_leave_nothing_behind(gpu, tmp_path):
    """Nothing is put aside during a call: other threads see the same hooks, also while a call raises."""
    encoder = hooked(text_encoder(tmp_path, bits=4))
    pipe, hook, seen = models.flux_pipeline(text_encoder=encoder), encoder._hf_hook, []
    done = threading.Event()

    def watch():
        while not done.is_set():
            seen.append(encoder._hf_hook is hook)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(20):
            with pytest.raises(ValueError, match="at most two arguments"):
                pipe.to("cpu", None, None)
            assert_says_float16_on_cpu(pipe)
    finally:
        done.set()
        watcher.join()
    assert seen
    assert all(seen)


def eight_bit_transformer(folder, side):
    """A FluxTransformer2DModel in 8 bits on the first device."""
    from diffusers import FluxTransformer2DModel

    models.saved(models.flux_transformer(), folder)
    try:
        return models.load_quantized(FluxTransformer2DModel, folder, bits=8)
    except ValueError as error:
        if side == "bare" and "`.to` is not supported for `8-bit`" in str(error):
            pytest.skip("no 8-bit model of diffusers loads here (diffusers-8bit-model-gate)")
        raise


def text_encoder(folder, bits: int, device_map=None):
    """A CLIPTextModel of transformers in 4 or 8 bits, on the first device if nothing else is asked for."""
    from transformers import CLIPTextModel

    if bits == 4 and unmet("transformers>=4.45"):
        pytest.skip("transformers before 4.45 refuses to move a 4-bit model at all")
    models.saved(models.clip_text(), folder)
    return models.load_quantized(CLIPTextModel, folder, bits, device_map or {"": 0})


def hooked(model):
    """The model with the hook that only aligns inputs, whatever this accelerate does by itself."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    return add_hook_to_module(model, AlignDevicesHook(execution_device=0, io_same_device=True))


def assert_says_float16_on_cpu(pipe):
    said = warnings_of(lambda: pipe.to("cpu"))
    assert FLOAT16_ON_CPU in said, f"pipe.to('cpu') {SILENT}, it said: {said or 'nothing'}"
