"""A textual inversion is loaded into a pipeline whose transformer has a hook that only aligns its inputs."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from ...offloading.hooks import is_sequentially_offloaded
    from ..models import textual_inversion

    pipe = textual_inversion.pipeline()
    hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    add_hook_to_module(pipe.transformer, hook)
    pipe.load_textual_inversion({"<new>": torch.ones(64)})
    flipped = [name for name, part in pipe.components.items() if is_sequentially_offloaded(part)]
    assert not flipped, f"loading it put {' and '.join(flipped)} under sequential CPU offload"
    assert pipe.transformer._hf_hook is hook, "the hook of the transformer was replaced"
    assert (pipe.text_encoder.get_input_embeddings().weight[-1] == 1).all(), "the embedding was not loaded"
    return "loaded the new embedding; no component was offloaded"
