"""LoRA weights for the tiny models, and pipelines that have them."""

from __future__ import annotations

import os

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.merged import OFFLOADS, kept
from tests.gate import unmet
from tests.rig import models

NAMES = ("one", "two")
SCALES = [0.5, 1.0]
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_TEXT = ("q_proj", "k_proj", "v_proj", "out_proj")


def weights(seed: int = 1, text: bool = False, rank: int = 4, transformer: bool = True) -> dict:
    """A LoRA for ``models.flux_transformer``, with ``text`` for ``models.clip_text`` too; large enough to matter."""
    import torch

    pytest.importorskip("peft", reason="peft is not installed")
    found = _of("transformer", models.flux_transformer(), _ATTENTION, rank) if transformer else {}
    if text:
        found.update(_of("text_encoder", models.clip_text(), _TEXT, rank))
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in found.items()}


def _of(prefix: str, model, targets: tuple[str, ...], rank: int) -> dict:
    import torch

    shapes = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(targets):
            shapes[f"{prefix}.{name}.lora_A.weight"] = (rank, layer.in_features)
            shapes[f"{prefix}.{name}.lora_B.weight"] = (layer.out_features, rank)
    return shapes


def skip_where_flux_takes_no_lora(bits: int) -> None:
    """Skip where only diffusers-flux-lora-packed lets a 4-bit Flux transformer have a LoRA, and the package is off."""
    off = os.environ.get("DIFFUSERS_QUANTFIX") == "off"
    if off and bits == 4 and not unmet("diffusers>=0.32") and unmet("diffusers>=0.32.2"):
        pytest.skip("before 0.32.2 diffusers compares a LoRA with the packed shape of a 4-bit weight")


def load(pipeline, *names: str, **options):
    """Load LoRAs named after ``NAMES``, with the ``options`` of ``weights``, and use all of them with ``SCALES``."""
    for name in names or NAMES:
        pipeline.load_lora_weights(weights(1 + NAMES.index(name), **options), adapter_name=name)
    if len(names or NAMES) > 1:
        pipeline.set_adapters(list(names or NAMES), SCALES)
    return pipeline


def run(pipeline, device="cpu", dtype=None):
    """The latents of one run on ``device``, on the CPU."""
    import torch

    if pipeline.text_encoder is not None:
        return models.prompt_flux(pipeline).cpu()
    return models.call_flux(pipeline, device, dtype or torch.float32).cpu()


def hooks_of(pipeline) -> dict:
    """Every hook of every component: (component, module name) -> (hook, where it runs the module)."""
    import torch

    return {
        (name, path): (module._hf_hook, str(getattr(module._hf_hook, "execution_device", None)))
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module)
        for path, module in component.named_modules()
        if hasattr(module, "_hf_hook")
    }


def distance(one, other) -> float:
    """The largest difference of two runs; infinite where either is not finite."""
    import torch

    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        return float("inf")
    return (one.float() - other.float()).abs().max().item()


def assert_taken_out_exactly(pipeline, offload: str, device, dtype, inference_mode=True) -> None:
    """``fuse_lora`` and ``unfuse_lora`` of one LoRA and of all, an interrupted run, and a fused model without LoRAs.

    Args:
        offload: one of ``merged.OFFLOADS``.
        inference_mode: whether the pipeline runs in it too.
    """
    import torch

    OFFLOADS[offload](pipeline, device)

    def output():
        return run(pipeline, device, dtype)

    with_lora = output()

    def check(latents):
        assert torch.equal(latents, with_lora), "the output is not what it was"

    for names in (["one"], None):
        pipeline.fuse_lora(components=["transformer"], adapter_names=names)
        assert distance(output(), with_lora) > 0
        pipeline.unfuse_lora(components=["transformer"])
        check(output())
        assert not kept(pipeline.transformer)
    assert_goes_on(output, check, (0.3, 0.5) if offload == "model" else (0.3, 0.8), inference_mode)
    pipeline.fuse_lora(components=["transformer"])
    fused = output()
    pipeline.unload_lora_weights()
    assert not kept(pipeline.transformer)
    assert torch.equal(output(), fused), "the output without LoRAs is not that of the fused ones"
