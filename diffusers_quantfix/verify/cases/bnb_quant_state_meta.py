"""A 4-bit Flux transformer and a 4-bit T5 encoder run three times under sequential offload."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    from accelerate import cpu_offload

    from ..models import four_bit

    where = four_bit.device()
    said: list[str] = []
    for name, load, run in (
        ("transformer", four_bit.flux, four_bit.run_flux),
        ("text encoder", four_bit.text_encoder, four_bit.encode),
    ):
        folder = f"{work}/{name}"
        try:
            reference = run(load(folder, where), where)
            model = load(folder, where)
            cpu_offload(model, where)
        except (ImportError, TypeError) as error:
            # The text encoder alone cannot be loaded: transformers needs a newer bitsandbytes, or bnb-param-kwargs.
            if said and (isinstance(error, ImportError) or "_is_hf_initialized" in str(error)):
                continue
            raise
        held = _allocated(where)
        errors = [(run(model, where) - reference).abs().max().item() for _ in range(3)]
        assert errors == [0, 0, 0], f"errors of the {name} in three runs under sequential offload: {errors}"
        left = _allocated(where) - held
        assert left <= 0, f"after three runs {left} bytes of the {name} are on {where}"
        said.append(f"the {name} ({len(four_bit.states_of(model))} quant states)")
    return f"{' and '.join(said)} under sequential offload on {where}: exact in three runs"


def _allocated(where: Any) -> int:
    """The bytes allocated on a CUDA device; 0 for the CPU, where offloaded weights are."""
    import gc

    import torch

    gc.collect()
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else 0
