"""Loading a pre-quantized 4-bit checkpoint: time against the number of its layers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .figure import Row, figure
from .measure import CannotMeasure, child

LAYERS = (64, 256, 1024, 4096)


@figure("load")
def load() -> Iterator[Row]:
    """The same checkpoint, with and without; and how the time of one layer grows with their number."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        child("loading:save", folder, list(LAYERS))
        with_us, without = {}, {}
        for layers in LAYERS:
            pairs = [
                {side: child("loading:seconds", folder, layers, package=side) for side in order}
                for order in ((True, False), (False, True), (True, False))
            ]
            with_us[layers] = min(pair[True] for pair in pairs)
            try:
                without[layers] = min(pair[False] for pair in pairs)
            except CannotMeasure as error:
                yield Row(f"load of {layers} layers in 4 bits", None, detail=str(error))
                continue
            yield Row(
                f"load of {layers} layers in 4 bits, with / without", with_us[layers] / without[layers], goal=1.05,
                detail=f"{1000 * with_us[layers]:.0f} ms / {1000 * without[layers]:.0f} ms",
            )  # fmt: skip
        first, last = LAYERS[1], LAYERS[-1]
        for name, found in (("with", with_us), ("without", without)):
            yield Row(
                f"time per layer, {last} layers / {first} layers, {name}",
                found[last] / last / (found[first] / first), goal=1.5 if name == "with" else None,
            )  # fmt: skip


def _model_class():
    """A diffusers model of ``count`` small Linear layers."""
    import torch
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config

    class Stack(ModelMixin, ConfigMixin):
        @register_to_config
        def __init__(self, count: int = 2):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(count))

    return Stack


def _config():
    import torch
    from diffusers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def save(folder: str, counts: list[int]) -> None:
    """Save pre-quantized checkpoints."""
    from .memory import _devices

    stack, _ = _devices()
    with stack:
        for layers in counts:
            whole = Path(folder) / f"whole-{layers}"
            kind = _model_class()
            kind(layers).save_pretrained(whole)
            kind.from_pretrained(whole, quantization_config=_config()).save_pretrained(
                Path(folder) / str(layers)
            )


def seconds(folder: str, layers: int) -> float:
    """Processor seconds of loading one, the second time in a process."""
    from .memory import _devices

    kind = _model_class()
    stack, _ = _devices()
    with stack:
        kind.from_pretrained(Path(folder) / str(min(LAYERS)))
        best = float("inf")
        for _ in range(3 if layers < 4096 else 1):
            began = time.process_time()
            kind.from_pretrained(Path(folder) / str(layers))
            best = min(best, time.process_time() - began)
        return best
