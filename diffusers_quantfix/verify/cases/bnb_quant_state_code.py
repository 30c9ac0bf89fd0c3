"""A 4-bit Flux transformer is moved from one GPU to another and runs there on a batch of one row."""

from __future__ import annotations

from ..case import NeedsDevice


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    if torch.cuda.device_count() < 2:
        raise NeedsDevice("needs two CUDA devices")
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    reference = four_bit.run_flux(four_bit.flux(f"{work}/flux", here), here)
    model = four_bit.flux(f"{work}/flux", here).to("cpu").to(there)
    error = (four_bit.run_flux(model, there) - reference).abs().max().item()
    assert error == 0, f"maximum error on {there}: {error:.3g}"
    states = four_bit.states_of(model)
    places = {str(state.code.device) for state in states}
    assert places == {str(there)}, f"the model is on {there}, code is on {', '.join(sorted(places))}"
    return f"moved from {here} over the CPU to {there}, with the code of {len(states)} quant states; output exact"
