"""A LoRA is loaded into a pipeline whose transformer has a hook that only aligns its inputs."""

from __future__ import annotations


def case(work: str) -> str | None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from ...offloading.hooks import is_sequentially_offloaded
    from ..models import lora

    expected = lora.run(lora.load(lora.pipeline()))
    pipe = lora.pipeline()
    hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    add_hook_to_module(pipe.transformer, hook)
    lora.load(pipe)
    assert not is_sequentially_offloaded(pipe.transformer), (
        "loading the LoRA put the transformer under sequential CPU offload"
    )
    assert pipe.transformer._hf_hook is hook, "the hook of the transformer was replaced"
    off = (lora.run(pipe) - expected).abs().max().item()
    assert off == 0, f"maximum error with the LoRA: {off:.3g}"
    return "the transformer is not offloaded and has the same hook; output with the LoRA exact"
