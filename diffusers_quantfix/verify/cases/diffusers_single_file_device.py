"""A 4-bit single file is loaded with a request for the last GPU of this machine."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    cuda("this diffusers quantizes on a GPU only")

    from diffusers import BitsAndBytesConfig, LTXVideoTransformer3DModel

    torch.manual_seed(0)
    LTXVideoTransformer3DModel(
        in_channels=64,
        out_channels=64,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        num_layers=1,
        caption_channels=64,
    ).save_pretrained(f"{work}/plain")
    config = BitsAndBytesConfig(load_in_4bit=True)
    LTXVideoTransformer3DModel.from_pretrained(
        f"{work}/plain", quantization_config=config, torch_dtype=torch.float16
    ).save_pretrained(f"{work}/quantized")

    wanted = torch.device("cuda", torch.cuda.device_count() - 1)
    model = LTXVideoTransformer3DModel.from_single_file(
        f"{work}/quantized/diffusion_pytorch_model.safetensors",
        config=f"{work}/quantized",
        quantization_config=config,
        torch_dtype=torch.float16,
        device_map={"": str(wanted)},
    )
    places = {str(tensor.device) for tensor in [*model.parameters(), *model.buffers()]}
    assert places == {str(wanted)}, f"requested {wanted}, the model is on {', '.join(sorted(places))}"
    return f"all {sum(1 for _ in model.parameters())} parameters are on {wanted}, as requested"
