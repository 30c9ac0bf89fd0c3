"""A T5 encoder is loaded while another thread makes a model, and after two threads have made models at once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    from transformers import initialization

    if hasattr(initialization, "no_tie_weights"):  # not in 5.0
        _tied(initialization.no_tie_weights, work)
    _functions_of_torch(initialization)
    return "the functions of torch are its own, and the encoder shares its weight"


def _functions_of_torch(initialization: Any) -> None:
    import sys

    import torch

    from ..models.threads import kept, overlapping

    modules = [sys.modules[name] for name in initialization.TORCH_MODULES_TO_PATCH if name in sys.modules]
    names = initialization.TORCH_INIT_FUNCTIONS
    places = [(module, name) for module in modules for name in names if hasattr(module, name)]
    weight = torch.nn.Parameter(torch.zeros(1))
    weight._is_hf_initialized = True  # as transformers marks what it has loaded
    with kept(*places):
        overlapping(initialization.guard_torch_init_functions)
        torch.nn.init.constant_(weight, 1.0)
    assert weight.item() == 1.0, "torch.nn.init.constant_ does nothing afterwards"


def _tied(no_tie_weights: Any, work: str) -> None:
    import torch
    from transformers import T5Config, T5EncoderModel
    from transformers.modeling_utils import PreTrainedModel

    from ..models.threads import kept, overlapping

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(work)

    def device() -> str:
        return str(T5EncoderModel.from_pretrained(work).encoder.embed_tokens.weight.device)

    with kept((PreTrainedModel, "tie_weights"), (torch, "linspace")):
        meanwhile = overlapping(no_tie_weights, device)
        afterwards = device()
    assert meanwhile == afterwards == "cpu", (
        f"the shared weight is on {meanwhile}, afterwards on {afterwards}"
    )
