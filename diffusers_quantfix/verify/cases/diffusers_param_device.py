"""A 4-bit model is loaded with a request for the last GPU of this machine."""

from __future__ import annotations

from ..models import flux
from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    cuda("this diffusers quantizes on a GPU only")

    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    flux.transformer().save_pretrained(work)
    wanted = torch.device("cuda", torch.cuda.device_count() - 1)
    others = [torch.device("cuda", i) for i in range(wanted.index)]
    before = {device: torch.cuda.max_memory_allocated(device) for device in others}
    model = FluxTransformer2DModel.from_pretrained(
        work,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        torch_dtype=torch.float16,
        device_map={"": str(wanted)},
    )
    places = {str(tensor.device) for tensor in [*model.parameters(), *model.buffers()]}
    assert places == {str(wanted)}, f"requested {wanted}, the model is on {', '.join(sorted(places))}"
    for device, held in before.items():
        more = torch.cuda.max_memory_allocated(device) - held
        assert more == 0, f"{more} bytes were temporarily held on {device}"
    return f"all {sum(1 for _ in model.parameters())} parameters are on {wanted}, as requested"
