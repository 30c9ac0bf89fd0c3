"""A Flux transformer is saved in 4 bits with its bytes stored as bfloat16, and loaded in float16."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import json

    import torch

    cuda("diffusers loads 4-bit models on a GPU only")
    from bitsandbytes.nn import Linear4bit, Params4bit
    from diffusers import FluxTransformer2DModel
    from safetensors.torch import save_file

    from ..models import four_bit
    from ..models.flux import transformer

    where = four_bit.device()
    model = transformer()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            quantized = Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None, quant_type="nf4"
            )
            quantized.weight = Params4bit(
                layer.weight.data.half(), requires_grad=False, quant_type="nf4", quant_storage=torch.bfloat16
            )
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, quantized.to(where))
    model.save_config(work)
    with open(f"{work}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "bfloat16",
    }
    with open(f"{work}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    saved = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(saved, f"{work}/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    again = FluxTransformer2DModel.from_pretrained(work, torch_dtype=torch.float16)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, Linear4bit)]
    for name in layers:
        # As bytes: read as floats, some are NaN, which is not equal to itself.
        before, after = (
            one.get_submodule(name).weight.data.cpu().reshape(-1).view(torch.uint8) for one in (model, again)
        )
        assert torch.equal(before, after), f"the bytes of {name} differ from the saved ones"
    return f"the bytes of {len(layers)} layers equal the saved ones"
