"""Loading a pre-quantized checkpoint: time with the package and without, against the number of its layers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.pipelines import gguf_files

from .figure import Row, figure
from .measure import CannotMeasure, child, not_measured

LAYERS = (64, 256, 1024, 4096)


@figure("load")
def load() -> Iterator[Row]:
    """The same checkpoint, with and without; and how the time of one layer grows with their number."""
    for kind in ("4-bit", "8-bit", "quanto", "torchao", "GGUF"):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            try:
                child("loading:save", folder, kind, list(LAYERS))
            except CannotMeasure as error:
                yield not_measured(f"load of {kind} layers", error)
                continue
            yield from _loaded(kind, folder)


def _loaded(kind: str, folder: str) -> Iterator[Row]:
    with_us, without = {}, {}
    for layers in LAYERS:
        try:
            pairs = [
                {side: child("loading:seconds", folder, kind, layers, package=side) for side in order}
                for order in ((True, False), (False, True), (True, False))
            ]
        except CannotMeasure as error:
            yield not_measured(f"load of {layers} {kind} layers, with / without", error)
            return
        with_us[layers] = min(pair[True] for pair in pairs)
        without[layers] = min(pair[False] for pair in pairs)
        yield Row(
            f"load of {layers} {kind} layers, with / without", with_us[layers] / without[layers], goal=1.05,
            detail=f"{1000 * with_us[layers]:.0f} ms / {1000 * without[layers]:.0f} ms",
        )  # fmt: skip
    first, last = LAYERS[1], LAYERS[-1]
    for name, found in (("with", with_us), ("without", without)):
        yield Row(
            f"time per {kind} layer, {last} layers / {first} layers, {name}",
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


def _config(kind: str):
    import torch
    from diffusers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

    if kind == "4-bit":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    if kind == "8-bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "quanto":
        return QuantoConfig(weights_dtype="int8")
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def _flux(layers: int):
    """A Flux transformer of about so many small Linear layers: diffusers reads GGUF files of such models only."""
    from tests.rig import models

    return models.flux_transformer(num_layers=1, num_single_layers=max(1, layers // 6))


def save(folder: str, kind: str, counts: list[int]) -> None:
    """Save pre-quantized checkpoints."""
    from .memory import _devices

    if kind == "GGUF":
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise CannotMeasure(str(error)) from error
        for layers in counts:
            path = Path(folder) / str(layers)
            path.mkdir()
            gguf_files.write(_flux(layers), path)
        return

    stack, _ = _devices()
    with stack:
        for layers in counts:
            whole = Path(folder) / f"whole-{layers}"
            cls = _model_class()
            cls(layers).save_pretrained(whole)
            cls.from_pretrained(whole, quantization_config=_config(kind)).save_pretrained(
                Path(folder) / str(layers)
            )


def seconds(folder: str, kind: str, layers: int) -> float:
    """Processor seconds of loading one, the second time in a process."""
    from .memory import _devices

    cls = _model_class()
    stack, gpu = _devices()
    with stack:
        # As the format asks for it: 8-bit layers are loaded to a GPU.
        where = {"device_map": {"": gpu.devices[0]}} if kind == "8-bit" else {}

        def load(path: Path) -> None:
            if kind == "GGUF":
                import torch
                from diffusers import FluxTransformer2DModel

                gguf_files.load(FluxTransformer2DModel, path, torch.float32)
            else:
                cls.from_pretrained(path, **where)

        load(Path(folder) / str(min(LAYERS)))
        best = float("inf")
        for _ in range(3 if layers < 4096 else 1):
            began = time.process_time()
            load(Path(folder) / str(layers))
            best = min(best, time.process_time() - began)
        return best
