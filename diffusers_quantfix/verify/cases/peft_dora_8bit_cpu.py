"""A DoRA is added to 8-bit layers on the CPU, whose weights must keep their data."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    from ..case import CannotReproduce

    try:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
        if layer.weight.dtype != torch.int8:
            raise CannotReproduce("this bitsandbytes does not quantize on a CPU")
    except (ImportError, RuntimeError, AssertionError) as error:
        raise CannotReproduce(f"bitsandbytes does not quantize here: {error!r}") from None
    model = torch.nn.Sequential(layer)
    config = LoraConfig(r=4, target_modules=["0"], use_dora=True)
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except AssertionError as error:
        raise CannotReproduce(f"peft dequantizes on a GPU only: {error}") from None
    assert not model[0].base_layer.weight.is_meta, "the weight is on meta, its data is lost"
    return "the weight keeps its data"
