"""Every backend in every placement, with and without LoRA: the output of the model that was never moved, and nothing
left behind.

What upstream refuses by design is listed in REFUSED with its message; such a refusal must come, and come whole.
"""

from __future__ import annotations

import gc
import itertools
import re

import pytest

from tests.fixes.callers import TEXT, assert_goes_on
from tests.fixes.callers import without_index as without_index
from tests.gate import unmet
from tests.marks import rest_is_whole
from tests.rig import models
from tests.sweep.backends import BACKENDS, OFTEN
from tests.sweep.placements import OFFLOADS, PLACEMENTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the sweep is about the newest releases"),
]

# (backend, placement, lora) as regular expressions -> the message with which it is refused by design.
REFUSED: dict[tuple[str, str, str], str] = {
    # peft would add the product of the LoRA to the packed bytes: diffusers-fuse-lora-gguf refuses before it does
    ("gguf", ".*", "fused"): "cannot be merged into GGUF weights",
}

LORA = ("none", "before", "after", "fused")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def lora():
    """A LoRA of rank 4 for the attention projections of ``models.flux_transformer``."""
    import torch

    generator = torch.Generator().manual_seed(1)
    model, weights = models.flux_transformer(), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("to_q", "to_k", "to_v")):
            weights[f"transformer.{name}.lora_A.weight"] = torch.randn(4, 64, generator=generator) * 0.1
            weights[f"transformer.{name}.lora_B.weight"] = torch.randn(64, 4, generator=generator) * 0.1
    assert weights
    return weights


_references: dict = {}


def with_lora(pipe, lora, fuse=False):
    pytest.importorskip("peft")
    pipe.load_lora_weights({name: tensor.clone() for name, tensor in lora.items()}, adapter_name="one")
    if fuse:
        pipe.fuse_lora()


def reference(gpu, backend, saved, dtype, lora, when):
    """The output of the model that was loaded where it runs, or came there in one step."""
    key = (backend, str(dtype), {"none": "none", "fused": "fused"}.get(when, "loaded"))
    if key not in _references:
        here = gpu.devices[0]
        pipe = models.flux_pipeline(BACKENDS[backend](saved, dtype, None))
        pipe.to(here)
        if when != "none":
            with_lora(pipe, lora, fuse=when == "fused")
        _references[key] = models.call_flux(pipe, device=here, dtype=dtype).cpu()
    return _references[key]


def refusal(backend, placement, when):
    for pattern, message in REFUSED.items():
        if all(
            re.fullmatch(one, said) for one, said in zip(pattern, (backend, placement, when), strict=True)
        ):
            return message
    return ""


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("backend", "when"),
    rest_is_whole(
        itertools.product(BACKENDS, LORA),
        *itertools.product(OFTEN, LORA),
        *itertools.product(BACKENDS, ["none"]),
    ),
)
def test_sweep(gpu, backend, placement, when, saved, lora):
    check(gpu, backend, placement, when, saved, lora, "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "placement", ["there and back", "model offload", "sequential", "group, leaf, stream"]
)
@pytest.mark.parametrize("backend", rest_is_whole(BACKENDS, *OFTEN))
def test_other_dtypes(gpu, backend, placement, dtype, saved, lora):
    check(gpu, backend, placement, "none", saved, lora, dtype)


# diffusers makes torch.device("cuda") of it
@pytest.mark.parametrize("without_index", [TEXT], indirect=True)
@pytest.mark.parametrize("placement", sorted(OFFLOADS))
@pytest.mark.parametrize("backend", rest_is_whole(BACKENDS, *OFTEN))
def test_without_an_index_interrupted_and_in_inference_mode(
    gpu, backend, placement, saved, lora, without_index
):
    import torch

    here, dtype = gpu.devices[0], torch.bfloat16
    expected = reference(gpu, backend, saved, dtype, lora, "none")
    gc.collect()
    before = {device: gpu.allocated(device) for device in gpu.devices}
    pipe = models.flux_pipeline(BACKENDS[backend](saved, dtype, None))
    device = PLACEMENTS[placement](pipe, here, gpu.devices[-1])

    def run():
        return models.call_flux(pipe, device=device, dtype=dtype).cpu()

    def check(latents):
        assert torch.equal(latents, expected), f"off by {(latents - expected).abs().max()}"

    # At its end model offload moves all back with the hooks off: an error there leaves a plain pipeline without them.
    parts = (0.3, 0.5) if placement == "model offload" else (0.3, 0.8)
    # torch cannot move torchao's tensors in inference mode: "Couldn't swap Linear.weight", on a plain CPU too.
    moves = backend.startswith("torchao") and not placement.startswith("group")
    assert_goes_on(run, check, parts, inference_mode=not moves)
    assert_nothing_left(gpu, pipe, placement, backend, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_map(gpu, backend, saved):
    """Loaded onto the second device: there, and only there."""
    import torch

    here, there = gpu.devices[0], gpu.devices[-1]
    expected = reference(gpu, backend, saved, torch.bfloat16, None, "none")
    gc.collect()
    gpu.reset()
    before = gpu.allocated(here)
    model = BACKENDS[backend](saved, torch.bfloat16, {"": str(there)})
    if there != here:
        assert gpu.peak(here) == before, "bytes on a device that was not asked for"
    output = models.call_flux(models.flux_pipeline(model), device=there, dtype=torch.bfloat16).cpu()
    assert torch.equal(output, expected)


def check(gpu, backend, placement, when, saved, lora, dtype):
    import torch

    dtype = getattr(torch, dtype)
    refused = refusal(backend, placement, when)
    expected = None if refused else reference(gpu, backend, saved, dtype, lora, when)
    gc.collect()
    gpu.reset()
    here, there = gpu.devices[0], gpu.devices[-1]
    before = {device: gpu.allocated(device) for device in gpu.devices}
    pipe = models.flux_pipeline(BACKENDS[backend](saved, dtype, None))
    try:
        if placement == "stay":
            pipe.to(here)
        if when == "before":
            with_lora(pipe, lora)
        device = PLACEMENTS[placement](pipe, here, there)
        if when in ("after", "fused"):
            with_lora(pipe, lora, fuse=when == "fused")
        outputs = [models.call_flux(pipe, device=device, dtype=dtype).cpu() for _ in range(2)]
    except Exception as error:
        if refused and re.search(refused, str(error)):
            return
        raise
    assert not refused, f"upstream does not refuse this any more: {refused}"
    for output in outputs:
        assert torch.equal(output, expected), f"off by {(output - expected).abs().max()}"
    if placement in OFFLOADS:
        assert_nothing_left(gpu, pipe, placement, backend, before)


def assert_nothing_left(gpu, pipe, placement, backend, before):
    """After a run under offload."""
    constants = [getattr(pipe.scheduler, name) for name in ("sigmas", "timesteps")]
    allowed = sum(one.nbytes for one in constants if one.device.type != "cpu")
    # bitsandbytes keeps the code of nested states, 256 float32
    allowed += 1024 * backend.endswith("double")
    # upstream leaves buffers where they are used; those of quanto are 4 bytes each
    if placement == "sequential":
        allowed += sum(buffer.nbytes for buffer in pipe.transformer.buffers())
    if placement == "model offload":
        pipe.maybe_free_model_hooks()
    left = {
        str(device): gpu.allocated(device) - held - allowed
        for device, held in before.items()
        if gpu.allocated(device) - held > allowed
    }
    assert not left, f"bytes left: {left}"
