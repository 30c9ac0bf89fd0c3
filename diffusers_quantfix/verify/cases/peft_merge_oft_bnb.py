"""An OFT is merged into a 4-bit bitsandbytes weight."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from peft import OFTConfig, get_peft_model

    from ..case import CannotReproduce
    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(four_bit.linear(torch.nn.Linear(128, 128), where))
    layers.is_loaded_in_4bit = True
    config = OFTConfig(r=0, oft_block_size=16, target_modules=["0"], init_weights=False)
    try:
        model = get_peft_model(layers, config)
    except (AttributeError, TypeError) as error:  # the first: peft with an older torch than it supports
        raise CannotReproduce(f"this peft adds no OFT to such a layer: {error}") from error
    layer = model.base_model.model[0]

    def weight() -> Any:
        base = layer.get_base_layer().weight
        return dequantize_4bit(base.data, base.quant_state).float().cpu()

    # Without a run: on some CPUs that would need the fix of another bug.
    rotation = layer.get_delta_weight("default").detach().float().cpu()
    expected = (rotation @ weight().t()).t()
    model.merge_adapter()
    off = float((weight() - expected).norm() / expected.norm())
    assert off < 0.2, f"merged, the weight is {off:.0%} off"
    return "the weight with the rotation, rounded to 4 bits"
