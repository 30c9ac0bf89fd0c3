"""A model is freed after torch.distributed.checkpoint has returned its state dict."""

from __future__ import annotations


def case(work: str) -> str | None:
    import gc
    import weakref

    import bitsandbytes  # noqa: F401  # torch alone does not activate the package
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    get_model_state_dict(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None, "the model is still in memory"
    return "the model is freed"
