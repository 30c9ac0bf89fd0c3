"""diffusers-lora-compiled: what a pipeline does to the LoRAs of a model that ``torch.compile`` wraps."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models.four_bit import run_flux
from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-lora-compiled"
SHOWS = r"AssertionError|not in the list of present adapters|not found in your"

STEPS = {
    "disable": lambda pipe: pipe.disable_lora(),
    "enable again": lambda pipe: (pipe.disable_lora(), pipe.enable_lora()),
    "scale": lambda pipe: pipe.set_adapters("lora", 0.5),
    "two": lambda pipe: pipe.set_adapters(["lora", "two"], [0.5, 0.25]),
    "fuse": lambda pipe: pipe.fuse_lora(),
    "fuse at a scale": lambda pipe: pipe.fuse_lora(lora_scale=0.5, adapter_names=["lora"]),
    "fuse and unfuse": lambda pipe: (pipe.fuse_lora(), pipe.unfuse_lora()),
    "fuse and unload": lambda pipe: (pipe.fuse_lora(), pipe.unload_lora_weights()),
    "delete": lambda pipe: pipe.delete_adapters("two"),
    "unload": lambda pipe: pipe.unload_lora_weights(),
}


def loaded(transformer=None):
    """A pipeline with two LoRAs, the first one active."""
    from diffusers_quantfix.verify.models import lora

    pipe = lora.pipeline(**({"transformer": transformer} if transformer is not None else {}))
    weights = lora.weights(pipe.transformer, "transformer")
    pipe.load_lora_weights(dict(weights), adapter_name="lora")
    pipe.load_lora_weights({key: value.flip(0) for key, value in weights.items()}, adapter_name="two")
    pipe.set_adapters("lora")
    return pipe


def compiled(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    return pipe


def run(pipe, device="cpu"):
    """The output of the model itself: a compiled one is traced by its first call, which takes seconds."""
    return run_flux(getattr(pipe.transformer, "_orig_mod", pipe.transformer), torch.device(device))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="peft>=0.14")
def test_as_without_compiling(step):
    plain, pipe = loaded(), compiled(loaded())
    assert torch.equal(run(plain), run(pipe))
    STEPS[step](plain)
    STEPS[step](pipe)
    expected, output = run(plain), run(pipe)
    assert torch.equal(expected, output), "the compiled one gives another output"
    assert plain.get_list_adapters() == pipe.get_list_adapters()
    assert plain.get_active_adapters() == pipe.get_active_adapters()
    assert getattr(plain, "num_fused_loras", 0) == getattr(pipe, "num_fused_loras", 0)
    assert type(pipe.transformer).__name__ == "OptimizedModule", "it is not compiled any more"


@pytest.mark.long
@pytest.mark.skipif(
    bool(unmet("torch>=2.9") or unmet("diffusers>=0.38")), reason="older compilers cannot trace packaging 26"
)
@pytest.mark.thorough
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_compiled_again():
    plain, pipe = loaded(), compiled(loaded())
    for step in (None, "scale", "disable", "unload"):
        if step:
            STEPS[step](plain)
            STEPS[step](pipe)
        expected = run(plain)
        assert torch.equal(run_flux(pipe.transformer, torch.device("cpu")), expected), step
    torch._dynamo.reset()


# 8-bit models have hooks before accelerate 1.13, which loading a LoRA takes for offload.
HOOKED = [
    pytest.mark.defect("diffusers-lora-offload-flip", shows="'NoneType' object has no attribute 'dtype'")
]
if unmet("accelerate<1.13"):
    HOOKED.clear()


@pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="its LoRA is in float32 before")
@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=HOOKED)])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="peft>=0.15")
def test_a_quantized_one(gpu, tmp_path, bits):
    device = gpu.devices[0]
    outputs = []
    for wrap in (lambda pipe: pipe, compiled):
        plain = models.flux_transformer()
        pipe = wrap(loaded(four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits)))
        with_it = run(pipe, device)
        pipe.disable_lora()
        outputs.append((with_it, run(pipe, device)))
        pipe.unload_lora_weights()
        assert torch.equal(run(pipe, device), outputs[-1][1])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert not torch.equal(*outputs[0])


def test_a_pipeline_without_a_compiled_model_is_called_itself():
    """Nothing stands for it: a subclass of the program sees its own methods."""
    from diffusers import FluxPipeline

    seen = []

    class Own(FluxPipeline):
        @property
        def _lora_loadable_modules(self):
            seen.append(type(self))
            return ["transformer"]

    pipe = loaded()
    pipe.__class__ = Own
    pipe.disable_lora()
    compiled(pipe).enable_lora()
    assert set(seen) == {Own}


def test_what_is_set_is_set_on_the_pipeline():
    pipe = compiled(loaded())
    before = set(vars(pipe))
    pipe.fuse_lora()
    assert set(vars(pipe)) - before <= {"_merged_adapters", "num_fused_loras"}
    assert not hasattr(pipe, "_pipeline")
