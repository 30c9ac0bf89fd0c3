"""A pipeline with a 4-bit text encoder whose device_map names two devices is moved to the GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from ..models import four_bit, lora

    where = four_bit.device()
    pipe = lora.pipeline(text_encoder_2=four_bit.text_encoder(f"{work}/text_encoder", where))
    # Like a model that accelerate has spread over two GPUs, which this machine may not have.
    pipe.text_encoder_2.hf_device_map = {"shared": 0, "encoder": 1}
    add_hook_to_module(pipe.text_encoder_2, AlignDevicesHook(io_same_device=True))
    try:
        pipe.to("cuda")
    except ValueError as error:
        assert "text_encoder_2" in str(error) or "sequential model offloading" in str(error), str(error)
    else:
        raise AssertionError("the pipeline was moved")
    return 'pipe.to("cuda") raises an error: text_encoder_2 is spread over several devices'
