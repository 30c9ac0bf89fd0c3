"""A pipeline with a 4-bit text encoder under sequential offload is moved to the GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from accelerate import cpu_offload

    from ..models import four_bit, lora

    where = four_bit.device()
    pipe = lora.pipeline(text_encoder_2=four_bit.text_encoder(f"{work}/text_encoder", where))
    cpu_offload(pipe.text_encoder_2, where)
    places = {name: part.device for name, part in pipe.transformer.named_parameters()}
    try:
        pipe.to("cuda")
    except ValueError as error:
        assert "you have activated sequential model offloading" in str(error), str(error)
    else:
        raise AssertionError("the pipeline was moved")
    assert places == {name: part.device for name, part in pipe.transformer.named_parameters()}
    return 'pipe.to("cuda") raises an error about sequential offload, before anything is moved'
