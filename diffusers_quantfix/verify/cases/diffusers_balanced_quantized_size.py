"""The plan of device_map="balanced" for a pipeline with a 4-bit transformer and a GPU with room for it."""

from __future__ import annotations

FREE = 450_000


def case(work: str) -> str | None:
    import json

    import torch
    from diffusers import FluxPipeline
    from diffusers.pipelines import pipeline_loading_utils

    from ..models import four_bit

    four_bit.plain_flux(f"{work}/transformer")
    # The plan is made before a weight is read, so it needs no GPU: the configuration of a saved 4-bit model is enough.
    with open(f"{work}/transformer/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with open(f"{work}/transformer/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    plan = pipeline_loading_utils._get_final_device_map(
        device_map="balanced",
        pipeline_class=FluxPipeline,
        passed_class_obj={},
        init_dict={"transformer": ("diffusers", "FluxTransformer2DModel")},
        library=None,
        max_memory={0: FREE},
        torch_dtype=torch.float16,  # the argument's names up to 0.39, and since then
        dtype=torch.float16,
        cached_folder=work,
    )
    assert plan == {"transformer": 0}, (
        f"the device map is {plan}, although {FREE:,} bytes are free on device 0"
    )
    return f"a 4-bit transformer that needs a third of {FREE:,} bytes is placed on device 0"
