"""What it costs to keep the packed weights while a LoRA is merged, and to put them back."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator

from .calls import both_sides
from .figure import Row, figure
from .measure import CannotMeasure, child, not_measured

FEATURES, LAYERS = 1024, 4


@figure("merge")
def merging() -> Iterator[Row]:
    """Merge and unmerge of a LoRA, which gives the same bits back; upstream rounds the weights twice."""
    for kind in ("4-bit", "8-bit", "torchao"):
        what = f"{kind}: merge and unmerge of a LoRA, with / without"
        try:
            said = child("merging:merged", kind)
        except CannotMeasure as error:
            yield not_measured(what, error, 1.5)
            continue
        detail = f"{1000 * said['with']:.1f} ms / {1000 * said['without']:.1f} ms for {LAYERS} layers"
        yield Row(what, said["with"] / said["without"], goal=1.5, detail=detail)


def merged(kind: str) -> dict[str, float]:
    """Processor seconds of one merge and unmerge with the package and without, on the CPU."""
    model = _adapted(kind)

    def call() -> None:
        model.merge_adapter()
        model.unmerge_adapter()

    return both_sides({"merge": (call, 1)})["merge"]


def _adapted(kind: str):
    """Layers with a LoRA, as large as those of a small transformer."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)
    layers = torch.nn.Sequential(*[_layer(kind) for _ in range(LAYERS)]).to("cpu").requires_grad_(False)
    layers.is_loaded_in_8bit, layers.is_loaded_in_4bit = kind == "8-bit", kind == "4-bit"
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(layers.bfloat16(), Int8WeightOnlyConfig())
        config = types.SimpleNamespace(get_apply_tensor_subclass=functools.partial(Int8WeightOnlyConfig))
        layers.hf_quantizer = types.SimpleNamespace(quantization_config=config)
    names = [str(number) for number in range(LAYERS)]
    return get_peft_model(layers, LoraConfig(r=8, target_modules=names, init_lora_weights=False)).eval()


def _layer(kind: str):
    import torch

    if kind == "torchao":
        return torch.nn.Linear(FEATURES, FEATURES)
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if kind == "8-bit":
        return Linear8bitLt(FEATURES, FEATURES, has_fp16_weights=False)
    return Linear4bit(FEATURES, FEATURES, compute_dtype=torch.float16, quant_type="nf4")
