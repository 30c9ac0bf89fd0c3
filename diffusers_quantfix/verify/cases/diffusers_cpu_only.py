"""A Flux transformer is quantized and run on the CPU, in 4 and in 8 bits."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import torch

    if torch.cuda.is_available():
        raise CannotReproduce("this machine has a GPU")

    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    from ..models import four_bit

    plain = four_bit.plain_flux(f"{work}/plain")
    reference = four_bit.run_flux(plain, plain.device)
    said = []
    for name, options, bound in (
        (
            "nf4",
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
            0.2,
        ),
        ("int8", {"load_in_8bit": True}, 0.05),
    ):
        model = FluxTransformer2DModel.from_pretrained(
            f"{work}/plain", quantization_config=BitsAndBytesConfig(**options), torch_dtype=torch.float32
        )
        error = (four_bit.run_flux(model, model.device) - reference).norm() / reference.norm()
        assert error < bound, f"error of {name}: {error:.1%}"
        said.append(f"{name} {error:.1%}")
    return f"loaded and run on the CPU; error relative to the unquantized model: {', '.join(said)}"
